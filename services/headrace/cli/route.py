"""`headrace route`: where a request would go, and why not elsewhere."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import grpc
from rich.console import Console

from headrace.api.inference.v1 import inference_service_pb2
from headrace.api.registry.v1 import registry_service_pb2 as registry_pb
from headrace.api.registry.v1 import resources_pb2
from headrace.api.router.v1 import router_service_pb2 as pb
from headrace.api.router.v1 import router_service_pb2_grpc as pb_grpc
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem, from_rpc
from headrace.cli.registration import CALL_S, Admin
from headrace.cli.status import table
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.rpc.proving import Secret
from headrace.runtime.settings import SettingsError

_EQUAL_S = 1e-6
_EXPLAIN = f"/{pb.DESCRIPTOR.services_by_name['RouterService'].full_name}/ExplainRoute"
_HINT = "name the Routers' own secret: --admin-secret-file FILE, or HEADRACE_ADMIN_SECRET_FILE"


@click.group(short_help="Show where requests go, and why.")
def route() -> None:
    """Show where a request would go, and why not elsewhere.

    \b
    headrace route explain chat-prod
    headrace route explain chat-prod --prompt "You are a helpful assistant. ..."
    """  # noqa: D301


@route.command(short_help="Explain one decision, without starting anything.")
@click.argument("model", required=False)
@click.option("--prompt", default="Hello", metavar="TEXT", help='Text of the request, "-" reads it; for kept prefixes.')
@click.option("--tenant", default="", metavar="NAME", help="Whose request, tenants/NAME; default: no credentials.")
@click.option("--session", "affinity_key", default="", metavar="KEY", help="The request's affinity_key.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="At most this many tokens of output.")
@click.option("--router", "router", default="", metavar="NAME", help="Which Router to ask; default: the first one.")
@click.option("--admin-secret-file", metavar="FILE", envvar="HEADRACE_ADMIN_SECRET_FILE", help="The Routers' own.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
def explain(
    model: str | None,
    prompt: str,
    tenant: str,
    affinity_key: str,
    max_tokens: int | None,
    router: str,
    admin_secret_file: str | None,
    as_json: bool,
) -> None:
    """Explain where a request for MODEL (an alias or a revision) would go now. Nothing is started.

    Each replica of the revision is listed, the best first: its score in seconds of expected wait (lower is better), the
    parts that the score is the sum of, and why it is not the one. A replica with an empty score is excluded; the last
    column says by what. Two replicas are drawn at random, those that keep the beginning of the prompt or the session
    are added, and the lowest score wins: so a replica with a better score may not have been drawn.

    \b
    queue_wait       until a slot is free, and sharing steps with what runs
    prefill          of the whole prompt
    prefix_locality  the prefill that a kept prefix saves
    kv_headroom      until there is room for prompt and output
    affinity         being the home of the session
    spread           being in a zone that holds more than its share
    slow_start       being new, or just recovered
    stale_load       what the age of the load report changes

    Every Router decides by what it knows itself; --router asks a certain one.
    """  # noqa: D301
    places = find()
    model = model or places.model
    if not model:
        raise Problem("no model was named", hint="headrace route explain MODEL", code=EXIT_USAGE)
    proof = _proof(admin_secret_file)
    record = _router(places.registry, router, places.router)
    generate = inference_service_pb2.GenerateRequest(
        model=model,
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        affinity_key=affinity_key,
        max_tokens=max_tokens,
    )
    if tenant and not tenant.startswith("tenants/"):
        tenant = f"tenants/{tenant}"
    with grpc.insecure_channel(record.admin_endpoint, options=CLIENT_OPTIONS) as channel:
        try:
            answer = pb_grpc.RouterServiceStub(channel).ExplainRoute(
                pb.ExplainRouteRequest(generate=generate, tenant=tenant), timeout=CALL_S, metadata=proof
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise Problem(f"{record.name} does not trust this call: {error.details()}", hint=_HINT) from None
            raise from_rpc(error, service="router", address=record.admin_endpoint) from None
    document = _document(answer, record.name)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document, Console(highlight=False))


def _proof(file: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call to a Router's admin port."""
    if not file:
        return ()
    try:
        return Secret(file, "--admin-secret-file").metadata(_EXPLAIN)
    except SettingsError as error:
        raise Problem(str(error), code=EXIT_USAGE) from None


def _router(registry: str, name: str, endpoint: str) -> resources_pb2.ServiceRecord:
    """The Router to ask: the one of that name, or the one that clients here use, or the first."""
    with Admin(registry) as admin, admin.errors():
        listed = admin.stub.ListServices(registry_pb.ListServicesRequest(), timeout=CALL_S)
    routers = [record for record in listed.services if record.name.startswith("routers/") and record.admin_endpoint]
    wanted = name if not name or name.startswith("routers/") else f"routers/{name}"
    if wanted:
        routers = [record for record in routers if record.name == wanted]
    if not routers:
        raise Problem(
            f"no Router {wanted} is registered" if wanted else "no Router is registered", hint="headrace status"
        )
    return next((record for record in routers if record.endpoint == endpoint), routers[0])


def _document(answer: pb.ExplainRouteResponse, router: str) -> dict[str, Any]:
    chosen = next((c for c in answer.candidates if c.replica == answer.chosen), None)
    return {
        "router": router,
        "snapshot": answer.snapshot_version,
        "revision": answer.revision,
        "chosen": answer.chosen or None,
        "refusal": answer.refusal or None,
        "replicas": answer.candidates_total,
        "candidates": [
            {
                "replica": candidate.replica,
                "score": round(candidate.score, 6) if candidate.HasField("score") else None,
                "parts": {part.name: round(part.seconds, 6) for part in candidate.parts},
                "in_flight": candidate.in_flight,
                "load_age": _age(candidate),
                "failure_domain": candidate.failure_domain,
                "excluded_by": candidate.excluded_by or None,
                "why": _why(candidate, chosen),
            }
            for candidate in answer.candidates
        ],
    }


def _why(candidate: pb.Candidate, chosen: pb.Candidate | None) -> str:
    """Why it is, or is not, the one: the filter, or the part that it lost most by."""
    if candidate.excluded_by:
        return f"excluded: {candidate.excluded_by}"
    if chosen is None:
        return ""
    if candidate.replica == chosen.replica:
        return "chosen"
    if candidate.score < chosen.score - _EQUAL_S:
        return "not drawn"
    if candidate.score <= chosen.score + _EQUAL_S:
        return "equal: chance"
    best = {part.name: part.seconds for part in chosen.parts}
    name, seconds = max(((p.name, p.seconds - best[p.name]) for p in candidate.parts), key=lambda lost: lost[1])
    return f"{name} +{_seconds(seconds)}"


def _print(document: dict[str, Any], console: Console) -> None:
    console.print(f"{document['revision']}, snapshot {document['snapshot']}, asked {document['router']}")
    candidates = document["candidates"]
    parts = [name for name in _names(candidates) if any(c["parts"].get(name) for c in candidates)]
    rows = [
        {
            "name": candidate["replica"],
            "score": "" if candidate["score"] is None else _seconds(candidate["score"]),
            **{name: _seconds(candidate["parts"][name]) if candidate["parts"] else "" for name in parts},
            "in flight": candidate["in_flight"],
            "load age": "" if candidate["load_age"] is None else _seconds(candidate["load_age"]),
            "domain": candidate["failure_domain"],
            "why": candidate["why"],
        }
        for candidate in candidates
    ]
    console.print(table("replica", rows, ("name", "score", *parts, "in flight", "load age", "domain", "why")))
    if document["replicas"] > len(candidates):
        console.print(f"{len(candidates)} of {document['replicas']} replicas are shown.")
    console.print(f"It would go to {document['chosen']}." if document["chosen"] else f"Refused: {document['refusal']}")


def _names(candidates: list[dict[str, Any]]) -> list[str]:
    return next((list(candidate["parts"]) for candidate in candidates if candidate["parts"]), [])


def _age(candidate: pb.Candidate) -> float | None:
    return candidate.load_age.ToMicroseconds() / 1e6 if candidate.HasField("load_age") else None


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if abs(value) >= 100 else f"{value:.3g} s"
