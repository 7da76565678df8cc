"""`headrace revoke`: take something out of service at once, and put it back."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table


@click.command(short_help="Take a revision, a replica or a key out of service at once.")
@click.argument("name", default="")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the people who find it; required.")
@click.option("--end-running", is_flag=True, help="Also end the requests that run on it. Default: they finish.")
@click.option("--lift", is_flag=True, help="End the revocation of NAME.")
@click.option("--list", "as_list", is_flag=True, help="Show what is revoked.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
def revoke(name: str, reason: str, end_running: bool, lift: bool, as_list: bool, as_json: bool) -> None:
    """Revoke NAME, whatever aliases and leases say, until it is lifted.

    NAME is a revision, a replica or a tenant's key. It need not exist yet. No new request is sent to it as soon as the
    Routers have the next snapshot; a Router that has lost the store refuses, once its snapshot's hard age has passed.

    \b
    headrace revoke models/m/revisions/0123456789ab --reason "leaks its prompt" --end-running
    headrace revoke replicas/s1-w0 --reason "ECC errors"
    headrace revoke tenants/acme/keys/k1 --reason "stolen"
    headrace revoke --lift replicas/s1-w0
    headrace revoke --list

    Exit code 1 if NAME is to be lifted and is not revoked.
    """  # noqa: D301
    _check(name, reason, end_running, lift, as_list)
    with Admin(find().registry) as admin, admin.errors():
        if lift:
            admin.stub.LiftRevocation(pb.LiftRevocationRequest(name=name), timeout=CALL_S)
            click.echo(f"lifted {name}")
        elif not as_list:
            made = resources_pb2.Revocation(name=name, reason=reason, end_running=end_running)
            _print([admin.stub.Revoke(pb.RevokeRequest(revocation=made), timeout=CALL_S).revocation], as_json=as_json)
        else:
            listed = admin.stub.ListRevocations(pb.ListRevocationsRequest(), timeout=CALL_S).revocations
            _print(list(listed), as_json=as_json)


def _check(name: str, reason: str, end_running: bool, lift: bool, as_list: bool) -> None:
    problem = ""
    if as_list:
        problem = "--list takes nothing else" if name or lift or reason or end_running else ""
    elif lift and (reason or end_running):
        problem = "--lift takes neither --reason nor --end-running"
    elif not name:
        problem = "NAME is missing: a revision, a replica or a tenant's key"
    elif not lift and not reason.strip():
        problem = '--reason is missing: say why, as in --reason "ECC errors"'
    if problem:
        raise Problem(problem, hint="headrace revoke --help", code=EXIT_USAGE)


def _print(revocations: list[resources_pb2.Revocation], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "name": message.name,
            "reason": message.reason,
            "end_running": message.end_running,
            "since": f"{message.create_time.ToDatetime():%Y-%m-%dT%H:%M:%SZ}",
        }
        for message in revocations
    ]
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        row["running requests"] = "ended" if row["end_running"] else "finish"
    Console(highlight=False).print(table("revoked", rows, ("name", "running requests", "since", "reason")))
