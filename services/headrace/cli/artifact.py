"""`headrace artifact`: make an artifact of a model's files, verify it, look at it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from headrace.adapters.route_codec import artifact_from_proto, artifact_to_proto
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import manifests
from headrace.cli.places import find
from headrace.cli.problems import EXIT_FAILURE
from headrace.cli.registration import CALL_S, Admin, full_artifact, parse_labels
from headrace.cli.show import Steps, print_json
from headrace.cli.status import table
from headrace.control.manifest import SIGNATURE
from headrace.control.resources import Labels

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
LABELS = click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, callback=parse_labels,
                      help="Label; repeatable.")  # fmt: skip


@click.group(short_help="Register model files by their digests, and verify them.")
def artifact() -> None:
    """Make an artifact of a model's files: its name is made of the digests of all of them.

    NAME is "artifacts/..." or its 12 digits.

    \b
    headrace artifact create ./my-model --label team=search
    headrace artifact verify artifacts/0123456789ab
    headrace artifact list
    """  # noqa: D301


@artifact.command(short_help="Hash a directory or file, and register it.")
@click.argument("path", type=click.Path(path_type=Path), metavar="DIR")
@LABELS
@click.option("--base", metavar="NAME", default="", help="For an adapter: the artifact that it adapts.")
@click.option("--signature", metavar="PATH",
              help=f"Signature over the files, below DIR. Default: {SIGNATURE}, if it is there.")  # fmt: skip
def create(path: Path, labels: Labels, base: str, signature: str | None) -> None:
    """Register the files of DIR, or the file DIR, and print the artifact's name. The files stay where they are.

    Hidden files and the signature are left out. A link to a file counts as that file; a link to a directory is not
    entered. The directory must lie where the Schedulers can read it. The same files again change nothing.
    """
    if signature is None:
        signature = SIGNATURE if (path / SIGNATURE).is_file() else ""
    with Steps() as steps, Admin(find().registry) as admin:
        base_digest = admin.artifact(base).digest if base else ""
        steps.begin("hash", str(path))
        made = manifests.make(
            manifests.source(path, signature=signature),
            progress=lambda done, size: steps.percent("hash", "SHA-256", done, size),
            labels=labels,
            base_digest=base_digest,
            signature=signature,
        )
        size = sum(file.size for file in made.files)
        steps.done("hash", f"{len(made.files)} files, {size:,} bytes: {made.digest}")
        steps.begin("register", made.location)
        name = admin.create_artifact(artifact_to_proto(made))
        stored = artifact_from_proto(admin.artifact(name))
        steps.done("register", name)
    if (stored.labels, stored.facts) != (made.labels, made.facts):
        click.echo(
            "headrace: note: these files were registered before, with other labels or facts, which stay: "
            f"`headrace artifact delete {name}` forgets them, if no revision needs it",
            err=True,
        )
    click.echo(name)


@artifact.command(short_help="Hash the files again, and name what differs.")
@click.argument("name")
@click.option("--location", type=click.Path(path_type=Path), metavar="DIR",
              help="Where the files are. Default: where they were registered.")  # fmt: skip
def verify(name: str, location: Path | None) -> None:
    """Hash the files of the artifact NAME again, and print each that is changed, missing or extra.

    Exit code 0 if all are as registered, 1 if not.
    """
    with Admin(find().registry) as admin:
        known = artifact_from_proto(admin.artifact(name))
    place = (location or Path(known.location)).expanduser()
    with Steps() as steps:
        steps.begin("verify", str(place))
        found = manifests.differences(known, place, lambda done, size: steps.percent("verify", "SHA-256", done, size))
        if not found:
            steps.done("verify", f"{len(known.files)} files of {known.name} are as registered")
            return
        steps.failed("verify", f"{place} is not {known.name}")
    for word, paths in (("changed", found.changed), ("missing", found.missing), ("extra", found.extra)):
        for differs in paths:
            click.echo(f"{word} {differs}")
    raise click.exceptions.Exit(EXIT_FAILURE)


@artifact.command("list", short_help="List artifacts.")
@LABELS
@_JSON
def list_artifacts(labels: Labels, as_json: bool) -> None:
    """List the artifacts that are registered, or those with all the labels."""
    with Admin(find().registry) as admin:
        found = admin.artifacts(dict(labels))
    if as_json or not sys.stdout.isatty():
        print_json([_document(a) for a in found])
        return
    rows = [
        {
            "name": a.name,
            "model": f"{a.facts.architecture or '-'} {a.facts.weight_type}",
            "files": len(a.files),
            "bytes": f"{sum(f.size for f in a.files):,}",
            "location": a.location,
            "labels": _text(dict(a.labels)),
        }
        for a in found
    ]
    Console(highlight=False).print(table("artifact", rows, ("name", "model", "files", "bytes", "location", "labels")))


@artifact.command(short_help="Show an artifact's files and what they say.")
@click.argument("name")
@_JSON
def show(name: str, as_json: bool) -> None:
    """Show the files of the artifact NAME with their digests, and what they say of the model."""
    with Admin(find().registry) as admin:
        found = admin.artifact(name)
    document = _document(found)
    if as_json or not sys.stdout.isatty():
        print_json(document)
        return
    console = Console(highlight=False)
    files, facts = document.pop("files"), document.pop("facts", {})
    rows = [{"name": k, "value": _text(v)} for k, v in {**document, **facts}.items()]
    console.print(table("artifact", rows, ("name", "value")))
    console.print(table("file", [{**f, "name": f["path"]} for f in files], ("name", "kind", "size", "sha256")))


@artifact.command(short_help="Forget an artifact; its files stay.")
@click.argument("name")
def delete(name: str) -> None:
    """Forget the artifact NAME, if no revision needs it. Its files stay where they are."""
    with Admin(find().registry) as admin, admin.errors():
        admin.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=full_artifact(name)), timeout=CALL_S)
    click.echo(f"deleted {full_artifact(name)}")


def _document(message: resources_pb2.Artifact) -> dict[str, Any]:
    document: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    document["files"] = [
        {
            "path": file.path,
            "size": file.size,
            "sha256": file.sha256,
            "kind": resources_pb2.ArtifactFile.Kind.Name(file.kind).removeprefix("KIND_").lower(),
        }
        for file in message.files
    ]
    return document


def _text(value: object) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
