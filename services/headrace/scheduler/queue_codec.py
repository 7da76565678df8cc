"""Between the contracts and the queue: what a Dispatch says of its load, what an engine measured, how busy workers are.

Pure functions, like headrace.scheduler.codec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import Attempt, Dispatched, EndedHere, Load
from headrace.control.load_class import tokens_of_bytes
from headrace.control.priority import Priority
from headrace.control.service_times import Served
from headrace.scheduler import codec

_EXTRA = frozenset(
    {
        inference_pb2.AttemptRecord.CAUSE_RETRY,
        inference_pb2.AttemptRecord.CAUSE_HEDGE,
        inference_pb2.AttemptRecord.CAUSE_CONTINUATION,
    }
)
_EFFORTS: Mapping[int, str] = {
    inference_pb2.REASONING_EFFORT_NONE: "none",
    inference_pb2.REASONING_EFFORT_LOW: "low",
    inference_pb2.REASONING_EFFORT_MEDIUM: "medium",
    inference_pb2.REASONING_EFFORT_HIGH: "high",
}


def with_load(known: Dispatched, message: pb.Dispatch) -> Dispatched:
    """Add what the queue has to know of a Dispatch. A priority that is not known ranks as the middle one."""
    try:
        priority = Priority(message.priority)
    except ValueError:
        priority = Priority.STANDARD
    return replace(
        known,
        tenant=message.tenant,
        weight=message.tenant_weight or 1,
        priority=priority,
        effort=_EFFORTS.get(message.effective_effort, ""),
        prompt_estimate=_prompt_tokens(message),
        is_prompt_exact=message.generate.WhichOneof("input") == "tokens",
        is_extra=message.cause in _EXTRA,
    )


def served(event: Mapping[str, Any], attempt: Attempt) -> Served | None:
    """What a `finished` event says of times. They are differences of the engine's own clock, so it may be anybody's.

    An attempt that was preempted, or waited for its reader, took longer than its class does: what it says of tokens
    does not count if it was preempted, and the average of tokens is one that outliers do not move much.
    """
    timing, usage = event.get("timing_ns") or {}, event.get("usage") or {}
    begun, first = timing.get("admitted") or 0, timing.get("first_token") or 0
    stopped, freed = timing.get("stopped") or 0, timing.get("finished") or 0
    generated = usage.get("generated") or 0
    if not begun or attempt.preempted_last:
        return None
    is_whole = event.get("reason") in ("stop", "length") and freed >= begun
    computed = (usage.get("prompt") or 0) - (usage.get("cached") or 0)
    return Served(
        prompt_tokens=max(1, computed),
        prefill_s=(first - begun) / 1e9 if first >= begun else None,
        token_s=(stopped - first) / 1e9 / (generated - 1) if generated > 1 and stopped > first >= begun else None,
        output_tokens=generated if is_whole else None,
        hold_s=(freed - begun) / 1e9 if is_whole else None,
    )


def ended_here(ended: EndedHere) -> pb.Ended:
    """Encode the end of an attempt that no engine knew of."""
    attempt = ended.attempt
    if ended.failure is not None:
        return codec.ended_by_refusal(attempt.token, attempt.record_version, ended.failure)
    return codec.ended_by_loss(attempt, had_output=False, drained=False)


def replica_load(replica: str, load: Load) -> pb.ReplicaLoad:
    """Encode how busy a worker is."""
    encoded = pb.ReplicaLoad(
        replica=replica,
        active=load.active,
        waiting=load.waiting,
        slots=load.slots,
        kv_cells_reserved=load.kv_cells_reserved,
        kv_cells=load.kv_cells,
        waiting_tokens=load.waiting_tokens,
        concurrency_limit=load.concurrency_limit,
        admits_from=int(load.admits_from) if load.admits_from > Priority.SHEDDABLE else 0,  # type: ignore[arg-type]
        prefill_tokens_per_second=load.prefill_tokens_per_s,
        waiting_max=load.waiting_max,
        room=load.room,
    )
    for one in load.closed:
        door = encoded.closed.add(tenant=one.tenant, priority=one.priority, tokens=one.tokens)
        for duration, seconds in ((door.wait, one.wait_s), (door.done, one.done_s)):
            if 0 < seconds < math.inf:
                duration.FromMilliseconds(round(seconds * 1000))
    encoded.queue_wait.FromMicroseconds(max(0, round(load.queue_wait_s * 1_000_000)))
    return encoded


def _prompt_tokens(message: pb.Dispatch) -> int:
    """Tokens of the prompt, exact where ids were sent. An answer that is continued is within `max_tokens`."""
    generate = message.generate
    kind = generate.WhichOneof("input")
    if kind == "tokens":
        return max(1, len(generate.tokens.ids))
    if kind == "prompt":
        return tokens_of_bytes(len(generate.prompt))
    return tokens_of_bytes(sum(len(m.content) for m in generate.conversation.messages))
