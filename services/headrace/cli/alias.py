"""`headrace alias`: the names that clients use, and the revisions that each is split over."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.artifact import LABELS
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table
from headrace.control.resources import Labels

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
_NAME = click.argument("name")


@click.group(short_help="Point names that clients use at revisions.")
def alias() -> None:
    """Show and change the names that clients use, and how each is split over revisions.

    NAME is "aliases/..." or its last part. With --etag a change is only made to the state that was read: if somebody
    was faster, it is refused and nothing changes.

    \b
    headrace alias list
    headrace alias set chat models/gemma/revisions/0123456789ab
    headrace alias set chat models/gemma/revisions/0123456789ab=90 models/gemma/revisions/ba9876543210=10
    headrace alias delete chat --etag 1742
    """  # noqa: D301


@alias.command("list", short_help="List aliases.")
@LABELS
@_JSON
def list_aliases(labels: Labels, as_json: bool) -> None:
    """List the aliases that are set: all, or those with all the labels."""
    with Admin(find().registry) as admin:
        documents = [_document(found) for found in admin.aliases(dict(labels))]
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(documents, indent=2, ensure_ascii=False))
        return
    rows = [
        {**document, "labels": ", ".join(f"{key}={value}" for key, value in sorted(document["labels"].items()))}
        for document in documents
    ]
    Console(highlight=False).print(table("alias", rows, ("name", "targets", "labels", "etag", "updated")))


@alias.command("set", short_help="Create an alias, or replace its targets.")
@_NAME
@click.argument("targets", nargs=-1, required=True, metavar="REVISION[=WEIGHT]...")
@click.option("--etag", default="", help="Only over the state that has this etag.")
@LABELS
@click.option("--no-labels", is_flag=True, help="Remove its labels. Default: they stay, unless --label is given.")
@_JSON
def set_alias(name: str, targets: tuple[str, ...], etag: str, labels: Labels, no_labels: bool, as_json: bool) -> None:
    """Point the alias NAME at one or more revisions, and print it as it is stored. It takes effect at once.

    Weights are relative to each other; without one, a revision has 1. Requests that run stay where they are.

    \b
    headrace alias set chat models/m/revisions/0123456789ab=90 models/m/revisions/ba9876543210=10
    """  # noqa: D301
    made = resources_pb2.Alias(name=_full(name), targets=map(_target, targets), etag=etag, labels=dict(labels))
    with Admin(find().registry) as admin:
        if not labels and not no_labels:
            admin.keep_labels(made)
        with admin.errors():
            stored = admin.stub.SetAlias(pb.SetAliasRequest(alias=made), timeout=CALL_S).alias
    document = _document(stored)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        Console(highlight=False).print(table("alias", [document], ("name", "targets", "etag")))


@alias.command(short_help="Delete an alias; its workers drain.")
@_NAME
@click.option("--etag", default="", help="Only the state that has this etag.")
def delete(name: str, etag: str) -> None:
    """Delete the alias NAME. Workers of revisions that no alias names any more finish what runs and stop.

    Exit code 1 if there is none, or it is not in the state of --etag.
    """
    with Admin(find().registry) as admin, admin.errors():
        admin.stub.DeleteAlias(pb.DeleteAliasRequest(name=_full(name), etag=etag), timeout=CALL_S)
    click.echo(f"deleted {_full(name)}")


def _full(name: str) -> str:
    return name if name.startswith("aliases/") else f"aliases/{name}"


def _target(text: str) -> resources_pb2.AliasTarget:
    revision, equals, weight = text.partition("=")
    if equals and not (weight.isascii() and weight.isdigit() and 0 < int(weight) < 2**32):
        raise Problem(
            f"{text!r}: the weight must be a whole number, 1 or more",
            hint="REVISION=WEIGHT, as in models/m/revisions/0123456789ab=90",
            code=EXIT_USAGE,
        )
    return resources_pb2.AliasTarget(revision=revision, weight=int(weight or 1))


def _document(message: resources_pb2.Alias) -> dict[str, Any]:
    total = sum(target.weight for target in message.targets) or 1
    return {
        "name": message.name,
        "targets": [
            {"revision": t.revision, "weight": t.weight, "share": f"{100 * t.weight / total:.3g}%"}
            for t in message.targets
        ],
        "labels": dict(message.labels),
        "etag": message.etag,
        "updated": f"{message.update_time.ToDatetime():%Y-%m-%dT%H:%M:%SZ}",
    }
