"""`headrace snapshot`: what Routers and Schedulers run on, what it was, and the way back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
from rich.console import Console

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2, routing_pb2
from headrace.cli.places import find
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table
from headrace.control.shards import REPLICAS

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")


@click.group(short_help="Show the routing snapshots, compare them, go back.")
def snapshot() -> None:
    """Show what Routers and Schedulers run on, and what it was.

    Every change makes a new snapshot with a higher version. The latest that changed models or aliases are kept, and
    `rollback` sets the aliases to what they were in one of them.

    \b
    headrace snapshot show
    headrace snapshot history
    headrace snapshot diff 41          what differs between 41 and now
    headrace snapshot rollback 41
    """  # noqa: D301


@snapshot.command(short_help="Show one snapshot.")
@click.argument("version", type=click.IntRange(min=0), default=0)
@_JSON
def show(version: int, as_json: bool) -> None:
    """Show the published snapshot, or with VERSION one that is kept; of an earlier one the replicas are not kept."""
    with Admin(find().registry) as admin:
        document = _document(_read(admin, version))
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    console.print(f"Snapshot {document['version']} ({document['digest'][:12]}), published {document['published']}")
    console.print(table("alias", document["aliases"], ("name", "targets")))
    console.print(table("revision", document["revisions"], ("name", "artifact")))
    console.print(table("replica", document["replicas"], ("name", "revision", "state", "endpoint")))
    if document["revocations"]:
        console.print(table("revocation", document["revocations"], ("name", "reason", "ends running")))


@snapshot.command(short_help="List the snapshots that are kept.")
@_JSON
def history(as_json: bool) -> None:
    """List the published snapshot and those that are kept, the newest first."""
    with Admin(find().registry) as admin, admin.errors():
        roots = admin.stub.ListSnapshots(pb.ListSnapshotsRequest(), timeout=CALL_S).roots
    rows = [_root(root) for root in roots]
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        Console(highlight=False).print(
            table("snapshot", rows, ("version", "published", "models", "replica shards", "revoked", "digest"))
        )


@snapshot.command(short_help="Compare two snapshots.")
@click.argument("old", type=click.IntRange(min=1))
@click.argument("new", type=click.IntRange(min=0), default=0)
@_JSON
def diff(old: int, new: int, as_json: bool) -> None:
    """Show what differs between snapshot OLD and snapshot NEW, or the published one.

    Aliases, revisions and revocations are compared; replicas are not kept.
    """
    with Admin(find().registry) as admin:
        rows = list(differences(_read(admin, old), _read(admin, new)))
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    elif rows:
        Console(highlight=False).print(table("change", rows, ("what", "name", "before", "after")))
    else:
        click.echo("no difference")


@snapshot.command(short_help="Set all aliases to what they were.")
@click.argument("version", type=click.IntRange(min=1))
@_JSON
def rollback(version: int, as_json: bool) -> None:
    """Set all aliases to what they were in snapshot VERSION, in one step.

    The result is a new snapshot: versions never go back. Requests that run stay where they are. Revocations and
    workers are not touched.
    """
    with Admin(find().registry) as admin, admin.errors():
        changed = list(admin.stub.RollBack(pb.RollBackRequest(version=version), timeout=CALL_S).changed)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps({"version": version, "changed": changed}, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(f"changed {name}" for name in changed) or f"the aliases are those of snapshot {version}")


def differences(old: routing_pb2.RoutingSnapshot, new: routing_pb2.RoutingSnapshot) -> Iterable[dict[str, str]]:
    """What changed from one snapshot to another, by kind and name; "" stands for what is not there."""
    kinds: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("alias", _targets),
        ("revision", lambda revision: str(revision.artifact or "no artifact")),
        ("revocation", lambda revocation: str(revocation.reason or "no reason")),
    )
    for kind, say in kinds:
        plural = "aliases" if kind == "alias" else f"{kind}s"
        before, after = ({item.name: say(item) for item in getattr(found, plural)} for found in (old, new))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield {"what": kind, "name": name, "before": before.get(name, ""), "after": after.get(name, "")}


def _read(admin: Admin, version: int) -> routing_pb2.RoutingSnapshot:
    with admin.errors():
        return admin.stub.GetSnapshot(pb.GetSnapshotRequest(version=version), timeout=CALL_S).snapshot


def _document(found: routing_pb2.RoutingSnapshot) -> dict[str, Any]:
    state = resources_pb2.Replica.State
    return {
        "version": found.version,
        "digest": found.digest,
        "incarnation": found.incarnation,
        "published": found.publish_time.ToJsonString(),
        "aliases": [{"name": a.name, "targets": _targets(a)} for a in found.aliases],
        "revisions": [{"name": r.name, "artifact": r.artifact} for r in found.revisions],
        "replicas": [
            {
                "name": r.name,
                "revision": r.revision,
                "state": state.Name(r.state).removeprefix("STATE_").lower(),
                "endpoint": r.endpoint,
            }
            for r in found.replicas
        ],
        "revocations": [
            {"name": r.name, "reason": r.reason, "ends running": "yes" if r.end_running else "no"}
            for r in found.revocations
        ],
    }


def _root(root: routing_pb2.RoutingRoot) -> dict[str, Any]:
    return {
        "version": root.version,
        "digest": root.digest,
        "published": root.publish_time.ToJsonString(),
        "models": sum(ref.name.startswith("models/") for ref in root.shards),
        "replica shards": sum(ref.name.startswith(REPLICAS) for ref in root.shards),
        "revoked": len(root.revocations),
    }


def _targets(alias: Any) -> str:
    total = sum(target.weight for target in alias.targets) or 1
    return ", ".join(f"{target.revision} {100 * target.weight / total:.3g} %" for target in alias.targets)
