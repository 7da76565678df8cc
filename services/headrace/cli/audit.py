"""`headrace audit`: who changed what."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.places import find
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table

_SHOWN_CHARACTERS = 60


@click.command(short_help="Show who changed what.")
@click.argument("resource", default="")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="N",
              help="At most so many records.")  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, with all of before and after; the default when piped."
)
def audit(resource: str, limit: int, as_json: bool) -> None:
    """Show the changes that were made, the newest first: when, by whom, what it was before and is after.

    With RESOURCE, its full name, only the changes of that one. The last 10,000 changes are kept. The name of the
    actor is what the caller said, beside the address that the call came from.

    \b
    headrace audit
    headrace audit aliases/chat
    headrace audit models/m/revisions/0123456789ab --json
    """  # noqa: D301
    with Admin(find().registry) as admin:
        records = _newest(admin, resource, limit)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps([_document(record) for record in records], indent=2, ensure_ascii=False))
        return
    rows = [
        {
            "name": f"{record.time.ToDatetime():%Y-%m-%d %H:%M:%S}",
            "actor": record.actor,
            "method": record.method,
            "on": record.resource,
            "change": _change(record),
        }
        for record in records
    ]
    Console(highlight=False).print(table("time (UTC)", rows, ("name", "actor", "method", "on", "change")))


def _newest(admin: Admin, resource: str, limit: int) -> list[resources_pb2.AuditRecord]:
    found: list[resources_pb2.AuditRecord] = []
    token = ""
    while True:
        request = pb.ListAuditRecordsRequest(resource=resource, page_token=token, page_size=limit - len(found))
        with admin.errors():
            page = admin.stub.ListAuditRecords(request, timeout=CALL_S)
        found += page.records
        token = page.next_page_token
        if not token or len(found) >= limit:
            return found


def _document(record: resources_pb2.AuditRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "time": record.time.ToJsonString(),
        "actor": record.actor,
        "method": record.method,
        "resource": record.resource,
        "before": json.loads(record.before_json or "null"),
        "after": json.loads(record.after_json or "null"),
    }


def _change(record: resources_pb2.AuditRecord) -> str:
    """The fields that differ, for a line of a table."""
    before, after = (json.loads(text or "{}") for text in (record.before_json, record.after_json))
    if not before or not after:
        return "created" if after else "deleted"
    fields = [f for f in sorted({*before, *after} - {"etag", "updateTime"}) if before.get(f) != after.get(f)]
    return "\n".join(f"{f}: {_short(before.get(f))} -> {_short(after.get(f))}" for f in fields)


def _short(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
