"""`headrace tenant`: who may call, how much, and with which keys."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click
import grpc
from google.protobuf.duration_pb2 import Duration
from rich.console import Console

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.answers import facts_table
from headrace.cli.artifact import LABELS
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table
from headrace.control.errors import Reason
from headrace.control.priority import Priority
from headrace.control.resources import Labels
from headrace.rpc import status

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
_NAME = click.argument("name")
_PRIORITIES = click.Choice([priority.name.lower() for priority in Priority])
_COUNT = click.IntRange(min=0, max=2**32 - 1)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group(short_help="Say who may call, how much, and with which keys.")
def tenant() -> None:
    """Show and change tenants: whose calls a Router takes, what each may use, and how much.

    NAME is "tenants/..." or its last part. Limits are of the whole fleet; each Router enforces its share. The tenant
    "anonymous" is that of callers without credentials, where the Routers take them.

    \b
    headrace tenant set acme --requests-per-minute 600 --concurrency 32 --model aliases/chat
    headrace tenant key create acme ci --lifetime 90d
    headrace tenant show acme
    headrace revoke tenants/acme/keys/ci --reason "in a log file"
    headrace tenant key delete acme ci
    headrace tenant delete acme
    """  # noqa: D301


@tenant.command("list", short_help="List tenants.")
@LABELS
@_JSON
def list_tenants(labels: Labels, as_json: bool) -> None:
    """List the tenants that are registered: all, or those with all the labels."""
    documents: list[dict[str, Any]] = []
    token = ""
    with Admin(find().registry) as admin:
        while True:
            request = pb.ListTenantsRequest(page_token=token, labels=dict(labels), page_size=1000)
            with admin.errors():
                page = admin.stub.ListTenants(request, timeout=CALL_S)
            documents += map(_document, page.tenants)
            token = page.next_page_token
            if not token:
                break
    if _is_json(as_json):
        return _print_json(documents)
    rows = [{**found, "keys": len(found["keys"])} for found in documents]
    columns = ("name", "requests_per_minute", "tokens_per_minute", "concurrency", "priority_ceiling", "keys")
    Console(highlight=False).print(table("tenant", rows, columns))
    return None


@tenant.command(short_help="Show one tenant and its keys.")
@_NAME
@_JSON
def show(name: str, as_json: bool) -> None:
    """Show the tenant NAME: its limits, and its keys without what would let anybody use them.

    Exit code 1 if there is none.
    """
    with Admin(find().registry) as admin, admin.errors():
        found = admin.stub.GetTenant(pb.GetTenantRequest(name=_full(name)), timeout=CALL_S).tenant
    _print(found, as_json=as_json)


@tenant.command("set", short_help="Create a tenant, or change its limits.")
@_NAME
@click.option("--model", "models", multiple=True, metavar="NAME", help="It may use aliases/A or models/M; repeat it.")
@click.option("--requests-per-minute", type=_COUNT, help="Requests a minute.")
@click.option("--tokens-per-minute", type=click.IntRange(min=0, max=2**63 - 1), help="Prompt and output, a minute.")
@click.option("--concurrency", type=_COUNT, help="Requests at a time.")
@click.option("--max-output-tokens", type=_COUNT, help="Output of one request.")
@click.option("--priority", type=_PRIORITIES, help="Of requests that name none.  [default: standard]")
@click.option("--priority-ceiling", type=_PRIORITIES, help="Highest that it gets.  [default: standard]")
@click.option("--weight", type=click.IntRange(1, 1000), help="Share against others of the same priority.  [default: 1]")
@click.option("--zone", "zones", multiple=True, metavar="ZONE", help="Zones that may serve it; repeat it.")
@click.option("--certificate", "certificates", multiple=True, metavar="NAME", help="Name in its client certificates.")
@click.option("--reset", is_flag=True, help="What is not given here becomes unlimited. Default: it stays as it is.")
@click.option("--etag", default="", help="Only over the state that has this etag.")
@LABELS
@_JSON
def set_tenant(
    name: str,
    reset: bool,
    etag: str,
    labels: Labels,
    as_json: bool,
    models: tuple[str, ...],
    zones: tuple[str, ...],
    certificates: tuple[str, ...],
    priority: str | None,
    priority_ceiling: str | None,
    **limits: int | None,
) -> None:
    """Create the tenant NAME, or change what is given; print it as it is stored. Its keys stay.

    A limit of 0 is none. Lists (--model, --zone, --certificate, --label) replace what was there. Routers have the
    change within a second; what runs goes on.

    \b
    headrace tenant set acme --tokens-per-minute 100000 --max-output-tokens 1024
    headrace tenant set batch-jobs --priority batch --priority-ceiling batch
    headrace tenant set acme --certificate spiffe://acme.example/api
    """  # noqa: D301
    made = resources_pb2.Tenant(name=_full(name))
    with Admin(find().registry) as admin:
        if not reset:
            made = _read(admin, made.name)
        for field, limit in limits.items():
            if limit is not None:
                setattr(made, field, limit)
        lists = {"allowed_models": models, "zones": zones, "certificate_names": certificates}
        for field, given in lists.items():
            if given:
                made.ClearField(field)
                getattr(made, field).extend(given)
        for field, word in (("default_priority", priority), ("priority_ceiling", priority_ceiling)):
            if word is not None:
                setattr(made, field, inference_pb2.Priority.Value(f"PRIORITY_{word.upper()}"))
        if labels:
            made.labels.clear()
            made.labels.update(labels)
        made.etag = etag or made.etag
        with admin.errors():
            stored = admin.stub.SetTenant(pb.SetTenantRequest(tenant=made), timeout=CALL_S).tenant
    _print(stored, as_json=as_json)


@tenant.command(short_help="Delete a tenant and its keys.")
@_NAME
@click.option("--etag", default="", help="Only the state that has this etag.")
def delete(name: str, etag: str) -> None:
    """Delete the tenant NAME with its keys. New calls with them are refused; what runs goes on.

    Exit code 1 if there is none, or it is not in the state of --etag.
    """
    with Admin(find().registry) as admin, admin.errors():
        admin.stub.DeleteTenant(pb.DeleteTenantRequest(name=_full(name), etag=etag), timeout=CALL_S)
    click.echo(f"deleted {_full(name)}")


@tenant.group(short_help="Make and delete a tenant's keys.")
def key() -> None:
    """Make and delete the keys of a tenant.

    To replace a key: make another one, hand it out, then delete the old one. To stop one at once, also where the store
    is out of reach for a while: headrace revoke tenants/NAME/keys/KEY.
    """


@key.command(short_help="Make a key, and print it once.")
@_NAME
@click.argument("key_id", metavar="KEY")
@click.option("--lifetime", metavar="TIME", help="How long it is accepted: 90d, 12h, 30m.  [default: for ever]")
def create(name: str, key_id: str, lifetime: str | None) -> None:
    """Make a key of the tenant NAME, called KEY. It is printed on standard output, alone, and never again.

    Only its SHA-256 is stored. Callers send it as metadata "authorization: Bearer ...".

    \b
    headrace tenant key create acme ci --lifetime 90d > ci.key
    """  # noqa: D301
    request = pb.CreateApiKeyRequest(tenant=_full(name), key_id=key_id)
    if lifetime is not None:
        request.lifetime.CopyFrom(_lifetime(lifetime))
    with Admin(find().registry) as admin, admin.errors():
        made = admin.stub.CreateApiKey(request, timeout=CALL_S)
    until = f"until {_time(made.key.expire_time)}" if made.key.HasField("expire_time") else "until it is deleted"
    click.echo(f"{made.key.name}, accepted {until}; keep it now, it is not shown again:", err=True)
    click.echo(made.secret)


@key.command("delete", short_help="Delete a key.")
@_NAME
@click.argument("key_id", metavar="KEY")
def delete_key(name: str, key_id: str) -> None:
    """Delete the key KEY of the tenant NAME. New calls with it are refused within a second.

    Exit code 1 if there is none.
    """
    full = f"{_full(name)}/keys/{key_id}"
    with Admin(find().registry) as admin, admin.errors():
        admin.stub.DeleteApiKey(pb.DeleteApiKeyRequest(name=full), timeout=CALL_S)
    click.echo(f"deleted {full}")


def _read(admin: Admin, name: str) -> resources_pb2.Tenant:
    """What is stored, to be changed and written over that state only; a new one if there is none."""
    with admin.errors():
        try:
            found = admin.stub.GetTenant(pb.GetTenantRequest(name=name), timeout=CALL_S).tenant
        except grpc.RpcError as error:
            failure = status.from_rpc_error(error)
            if failure is None or failure.reason is not Reason.NOT_FOUND:
                raise
            return resources_pb2.Tenant(name=name)
    found.ClearField("keys")
    return found


def _full(name: str) -> str:
    return name if name.startswith("tenants/") else f"tenants/{name}"


def _lifetime(text: str) -> Duration:
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise Problem(f"{text!r} is no lifetime", hint="a number and s, m, h or d, as in 90d", code=EXIT_USAGE)
    return Duration(seconds=int(found[1]) * _UNITS_S[found[2]])


def _is_json(as_json: bool) -> bool:
    return as_json or not sys.stdout.isatty()


def _print(found: resources_pb2.Tenant, *, as_json: bool) -> None:
    document = _document(found)
    if _is_json(as_json):
        return _print_json(document)
    keys = [
        f"{each['name'].rpartition('/')[2]} (made {each['created']}"
        + (f", expires {each['expires']})" if each["expires"] else ")")
        for each in document.pop("keys")
    ]
    facts = {name.replace("_", " "): _cell(value) for name, value in document.items()}
    Console(highlight=False).print(facts_table({**facts, "keys": ", ".join(keys) or "none"}))
    return None


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={text}" for key, text in sorted(value.items())) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return str(value) if value else "-"


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _document(message: resources_pb2.Tenant) -> dict[str, Any]:
    return {
        "name": message.name,
        "allowed_models": list(message.allowed_models),
        "requests_per_minute": message.requests_per_minute,
        "tokens_per_minute": message.tokens_per_minute,
        "concurrency": message.concurrency,
        "max_output_tokens": message.max_output_tokens,
        "priority": Priority(message.default_priority).name.lower(),
        "priority_ceiling": Priority(message.priority_ceiling).name.lower(),
        "weight": message.weight,
        "zones": list(message.zones),
        "certificate_names": list(message.certificate_names),
        "labels": dict(message.labels),
        "etag": message.etag,
        "updated": _time(message.update_time),
        "keys": [
            {
                "name": each.name,
                "created": _time(each.create_time),
                "expires": _time(each.expire_time) if each.HasField("expire_time") else "",
            }
            for each in message.keys
        ],
    }


def _time(stamp: Any) -> str:
    return f"{stamp.ToDatetime():%Y-%m-%dT%H:%M:%SZ}"
