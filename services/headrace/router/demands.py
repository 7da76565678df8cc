"""What routing needs to know of a request and of a load report, read out of their messages."""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.affinity import affinity_hash
from headrace.control.deadlines import Budget
from headrace.control.doors import Asking, Closed
from headrace.control.filters import Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.outliers import EjectionRules
from headrace.control.prefix_index import salt, text_blocks, token_blocks
from headrace.control.priority import Priority
from headrace.control.resources import Revision
from headrace.control.routing import RoutingRules
from headrace.control.tenants import Tenant
from headrace.router.codec import guided_kind
from headrace.router.settings import RouterSettings

BYTES_PER_TOKEN = 4
"""Of a text prompt; what it has in truth is known once an engine has cut it."""


def demand_of(
    request: pb.GenerateRequest,
    revision: Revision,
    tenant: Tenant,
    output_tokens_max: int,
    budget: Budget | None = None,
) -> Demand:
    """What a request asks of a replica.

    Args:
        request: checked and completed for the revision.
        revision: pinned.
        tenant: whose it is.
        output_tokens_max: if it sets none.
        budget: its limits; None: no replica is expected to refuse it.
    """
    chain, ids = salt(tenant.name, revision.name), request.tokens.ids
    parts = () if ids else tuple(_text(request))
    return Demand(
        prompt_size=len(ids) if ids else sum(map(len, parts)),
        is_tokens=bool(ids),
        output_tokens=min(request.max_tokens or output_tokens_max, revision.execution.context_tokens),
        blocks=token_blocks(ids, chain) if ids else text_blocks(parts, chain),
        affinity=affinity_hash(tenant.name, revision.name, request.affinity_key),
        zones=frozenset(tenant.zones),
        priority=request.priority or Priority.STANDARD,
        asking=None if budget is None else _asking(request, revision, tenant, output_tokens_max, budget),
        guided=guided_kind(request),
    )


def tokens_of(request: pb.GenerateRequest, revision: Revision, output_tokens_max: int) -> int:
    """Prompt and output, as estimated: never more than its revision's context holds."""
    guide = request.guided_decoding.ByteSize() if request.HasField("guided_decoding") else 0
    prompt = len(request.tokens.ids) or (request.ByteSize() - guide) // BYTES_PER_TOKEN
    output = request.max_tokens if request.HasField("max_tokens") else output_tokens_max
    return min(prompt + output, revision.execution.context_tokens)


def _asking(
    request: pb.GenerateRequest, revision: Revision, tenant: Tenant, output_tokens_max: int, budget: Budget
) -> Asking:
    return Asking(
        request.priority or Priority.STANDARD,
        tenant.name,
        tokens_of(request, revision, output_tokens_max),
        math.inf if budget.queue_s is None else budget.queue_s,
        budget.deadline_at,
    )


def _text(request: pb.GenerateRequest) -> Iterator[bytes]:
    """The text, before the template: equal beginnings of this are equal beginnings of what the template makes."""
    if request.WhichOneof("input") == "prompt":
        yield request.prompt.encode()
    for message in request.conversation.messages:
        yield b"\0%d\0" % message.role
        yield message.content.encode()


def report_of(load: scheduler_pb2.ReplicaLoad) -> ReplicaReport:
    """What a Scheduler says of one replica."""
    return ReplicaReport(
        active=load.active,
        waiting=load.waiting,
        slots=load.slots,
        kv_cells_reserved=load.kv_cells_reserved,
        kv_cells=load.kv_cells,
        queue_wait_s=load.queue_wait.ToMicroseconds() / 1e6 if load.HasField("queue_wait") else None,
        concurrency_limit=load.concurrency_limit,
        admits_from=load.admits_from,
        prefill_tokens_per_s=float(load.prefill_tokens_per_second),
        room=load.room if load.HasField("room") else None,
        closed=tuple(_closed(one) for one in load.closed),
        kv_stored=load.kv_tokens_stored,
        kv_removed=load.kv_tokens_removed,
    )


def _closed(door: scheduler_pb2.ClosedDoor) -> Closed:
    wait_s = door.wait.ToMilliseconds() / 1000 if door.HasField("wait") else 0.0
    done_s = door.done.ToMilliseconds() / 1000 if door.HasField("done") else 0.0
    return Closed(door.tenant, door.priority, door.tokens, wait_s if wait_s or done_s else math.inf, done_s)


def rules_of(settings: RouterSettings) -> RoutingRules:
    """What the settings say of routing."""
    return RoutingRules(
        ramp_s=settings.slow_start_s,
        ejection=EjectionRules(time_s=settings.ejection_s, share_max=settings.ejected_share_max),
        zones_excluded=frozenset(zone.strip() for zone in settings.zones_excluded.split(",") if zone.strip()),
    )
