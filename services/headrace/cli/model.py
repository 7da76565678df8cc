"""`headrace model`: register model files, list them, take them out of service."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.cli.registration import CALL_S, Admin, Execution, manifest, model_id, parse_labels
from headrace.cli.show import Steps
from headrace.cli.status import table
from headrace.cli.survey import survey
from headrace.control.resources import Labels

_DEFAULT = Execution()


@click.group(short_help="Register, list and remove models.")
def model() -> None:
    """Register model files with a running stack, list what is registered, and take models out of service.

    \b
    headrace model add my-model.gguf
    headrace model list
    headrace model remove my-model
    """  # noqa: D301


@model.command(short_help="Register a GGUF file and serve it.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="What clients call it. Default: made from the file's name.")
@click.option("--chat-template", type=click.Path(path_type=Path), metavar="FILE",
              help="Jinja chat template, for models whose file has none.")  # fmt: skip
@click.option("--sha256", "expected", metavar="HEX", default="", help="Refuse the file unless this is its SHA-256.")
@click.option("--context", "context_tokens", type=click.IntRange(16), default=_DEFAULT.context_tokens,
              show_default=True, metavar="TOKENS", help="Most tokens of one request, prompt and output.")  # fmt: skip
@click.option("--slots", type=click.IntRange(1), default=_DEFAULT.slots, show_default=True,
              help="Requests that run at a time.")  # fmt: skip
@click.option("--kv-cells", type=click.IntRange(16), metavar="TOKENS",
              help="KV cache that all requests share. Default: context times 4, or slots/4 if more.")  # fmt: skip
@click.option("--threads", type=click.IntRange(0), default=0, help="Compute threads; 0 lets the Scheduler choose.")
@click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, callback=parse_labels,
              help="Label of the artifact and of the revision; repeatable.")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Do not wait until a worker serves it.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True,
              metavar="SECONDS", help="How long to wait for the worker.")  # fmt: skip
def add(
    file: Path,
    name: str | None,
    chat_template: Path | None,
    expected: str,
    context_tokens: int,
    slots: int,
    kv_cells: int | None,
    threads: int,
    labels: Labels,
    no_wait: bool,
    timeout_s: float,
) -> None:
    """Register the GGUF FILE under its SHA-256, point an alias at it, and wait until a worker serves it.

    FILE must lie where the Schedulers can read it. Adding the same file again changes nothing.
    """
    alias = model_id(name, file)
    execution = Execution(
        context_tokens=context_tokens,
        slots=slots,
        kv_cells=kv_cells or context_tokens * max(4, slots // 4),
        threads=threads,
    )
    with Steps() as steps, Admin(find().registry) as admin:
        steps.begin("check", str(file))
        files = manifest(
            file,
            chat_template=chat_template,
            expected=expected,
            labels=labels,
            progress=lambda done, size: steps.percent("check", "SHA-256", done, size),
        )
        steps.done("check", f"SHA-256 {_weights(files).sha256[:12]}...")
        steps.begin("register", alias)
        artifact = admin.create_artifact(files)
        kind = resources_pb2.Execution.ENGINE_LLAMACPP
        revision = admin.add(name=alias, engine=kind, execution=execution, artifact=artifact, labels=labels)
        steps.done("register", revision)
        if not no_wait:
            steps.begin("load", "waiting for a Scheduler")
            replica = admin.wait_ready(revision, timeout_s, lambda text: steps.note("load", text))
            steps.done("load", f"served by {replica}")
    click.echo(revision)


def _weights(artifact: resources_pb2.Artifact) -> resources_pb2.ArtifactFile:
    return next(file for file in artifact.files if file.kind == resources_pb2.ArtifactFile.KIND_WEIGHTS)


@model.command("list", short_help="List aliases and the revisions behind them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
def list_models(as_json: bool) -> None:
    """List the names that clients can use, the revisions behind them, and whether they are served."""
    document = survey(find().registry).document()
    states: dict[str, list[str]] = {}
    for replica in document["replicas"]:
        states.setdefault(replica["revision"], []).append(replica["state"])
    rows = [
        {
            "name": alias["name"].removeprefix("aliases/"),
            "targets": alias["targets"],
            "state": ", ".join(s for t in alias["targets"] for s in states.get(t["revision"], ["no replica"])),
        }
        for alias in document["aliases"]
    ]
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(rows, indent=2))
    else:
        Console(highlight=False).print(table("model", rows, ("name", "state", "targets")))


@model.command(short_help="Remove an alias; its workers drain.")
@click.argument("name")
def remove(name: str) -> None:
    """Remove the alias NAME. Workers of revisions that no alias names any more finish what runs and stop.

    The artifact and the revision stay registered: their names mean the same for ever.
    """
    with Admin(find().registry) as admin:
        known = [alias.name.removeprefix("aliases/") for alias in admin.snapshot().snapshot.aliases]
        wanted = name.removeprefix("aliases/")
        if wanted not in known:
            raise Problem(
                f"no model is called {wanted!r}", hint=f"known: {', '.join(known) or 'none'}", code=EXIT_USAGE
            )
        with admin.errors():
            admin.stub.DeleteAlias(pb.DeleteAliasRequest(name=f"aliases/{wanted}"), timeout=CALL_S)
    click.echo(f"removed {wanted}")
