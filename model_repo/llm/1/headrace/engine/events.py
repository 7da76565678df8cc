"""The events of the contract, as documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.engine.contract import CONTRACT
from headrace.engine.request import DRAINED, RefusalError
from headrace.engine.sequence import Sequence


def hello(identity: Mapping[str, Any], incarnation: str) -> dict[str, Any]:
    """The first event of a stream."""
    return {"type": "hello", "contract": CONTRACT, "engine": dict(identity), "incarnation": incarnation}


def admitted(sequence: Sequence) -> dict[str, Any]:
    """It has a lane; prefill begins."""
    return {
        "type": "admitted",
        "seq": sequence.id,
        "prompt_tokens": len(sequence.request.prompt),
        "cached_tokens": sequence.cached,
    }


def preempted(sequence: Sequence) -> dict[str, Any]:
    """It has lost its lane and wants credit."""
    return {"type": "preempted", "seq": sequence.id, "preemptions": sequence.preemptions}


def resumed(sequence: Sequence) -> dict[str, Any]:
    """It has a lane again; told before anything is prefilled, so `position` is what was there."""
    return {
        "type": "resumed",
        "seq": sequence.id,
        "preemptions": sequence.preemptions,
        "cached_tokens": sequence.position,
    }


def sequences(live: Iterable[int]) -> dict[str, Any]:
    """Those of the stream's owner that have not ended."""
    return {"type": "sequences", "seqs": list(live)}


def refused(seq: int, error: RefusalError) -> dict[str, Any]:
    """Nothing was computed and nothing is held."""
    return {"type": "refused", "seq": seq, "error": error.document()}


def finished(
    sequence: Sequence,
    reason: str,
    *,
    stop: Mapping[str, Any] | None = None,
    error: RefusalError | None = None,
) -> dict[str, Any]:
    """The end of a sequence; its lane is free already."""
    return {
        "type": "finished",
        "seq": sequence.id,
        "reason": "cancelled" if reason == DRAINED else reason,
        "stop": stop,
        "usage": {
            "prompt": len(sequence.request.prompt),
            "cached": sequence.cached,
            "generated": sequence.generated - sequence.known,
            "emitted": sequence.generated - sequence.known - sequence.withheld,
            "proposed": sequence.proposed,
            "reasoning": 0,
        },
        "timing_ns": {
            "received": sequence.request.received_ns,
            "admitted": sequence.admitted_ns,
            "first_token": sequence.first_token_ns,
            "stopped": sequence.stopped_ns,
            "finished": sequence.freed_ns,
        },
        "error": error.document() if error else None,
    }
