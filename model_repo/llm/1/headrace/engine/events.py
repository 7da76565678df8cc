"""The events of the contract, as documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.engine.contract import CONTRACT
from headrace.engine.request import RefusalError
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


def refused(seq: int, error: RefusalError) -> dict[str, Any]:
    """Nothing was computed and nothing is held."""
    return {"type": "refused", "seq": seq, "error": error.document()}


def finished(
    sequence: Sequence,
    reason: str,
    finished_ns: int,
    *,
    stop: Mapping[str, Any] | None = None,
    error: RefusalError | None = None,
) -> dict[str, Any]:
    """The end of a sequence; its lane is free already."""
    return {
        "type": "finished",
        "seq": sequence.id,
        "reason": reason,
        "stop": stop,
        "usage": {
            "prompt": len(sequence.request.prompt),
            "cached": sequence.cached,
            "generated": sequence.generated,
            "emitted": sequence.generated - sequence.withheld,
            "proposed": 0,
            "reasoning": 0,
        },
        "timing_ns": {
            "received": sequence.request.received_ns,
            "admitted": sequence.admitted_ns,
            "first_token": sequence.first_token_ns,
            "finished": finished_ns,
        },
        "error": error.document() if error else None,
    }
