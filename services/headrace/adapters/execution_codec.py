"""How a revision runs, to and from its proto. Enums keep their names; zero is "not set"."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from headrace.api.registry.v1 import resources_pb2
from headrace.control.resources import Abort, DraftMethod, Engine, Execution, Speculative

E = TypeVar("E", bound=enum.Enum)

_ENGINES: dict[Engine, Any] = {e: resources_pb2.Execution.Engine.Value(f"ENGINE_{e.name}") for e in Engine}
_ABORTS: dict[Abort, Any] = {a: resources_pb2.Execution.Abort.Value(f"ABORT_{a.name}") for a in Abort}
_METHODS: dict[DraftMethod, Any] = {m: resources_pb2.Speculative.Method.Value(f"METHOD_{m.name}") for m in DraftMethod}
_SAME = (
    "context_tokens",
    "slots",
    "kv_cells",
    "prefill_chunk",
    "threads",
    "synthetic_prefill_tokens_per_s",
    "synthetic_decode_tokens_per_s",
    "run_ahead_tokens",
    "tensor_parallel",
    "pipeline_parallel",
    "device",
    "gpus",
    "gpu_memory_fraction",
    "dtype",
    "kv_events",
    "eager",
)
"""Fields that are the same on both sides."""


class BadRecord(ValueError):
    """A stored or received record cannot be understood; the message says why."""


def execution_to_proto(run: Execution) -> resources_pb2.Execution:
    """Encode how a revision runs."""
    message = resources_pb2.Execution(
        engine=_ENGINES[run.engine],
        abort=_ABORTS[run.abort] if run.abort is not None else None,
        **{name: getattr(run, name) for name in _SAME},
    )
    if run.speculative is not None:
        one = run.speculative
        message.speculative.method = _METHODS[one.method] if one.method is not None else 0  # type: ignore[assignment]
        message.speculative.draft_tokens = one.draft_tokens
        message.speculative.draft_artifact = one.draft_artifact
        message.speculative.ngram_max = one.ngram_max
    return message


def execution_from_proto(message: resources_pb2.Execution) -> Execution:
    """Decode how a revision runs.

    Raises:
        BadRecord: an enum has a value that is not known here.
    """
    speculative = None
    if message.HasField("speculative"):
        one = message.speculative
        speculative = Speculative(
            enum_of(_METHODS, one.method, "execution.speculative.method") if one.method else None,
            one.draft_tokens,
            one.draft_artifact,
            one.ngram_max,
        )
    return Execution(
        engine=enum_of(_ENGINES, message.engine, "execution.engine"),
        abort=enum_of(_ABORTS, message.abort, "execution.abort") if message.abort else None,
        speculative=speculative,
        **{name: getattr(message, name) for name in _SAME},
    )


def enum_of(table: dict[E, Any], value: int, field: str) -> E:
    """The member whose number is `value`.

    Raises:
        BadRecord: there is none.
    """
    for member, number in table.items():
        if number == value:
            return member
    raise BadRecord(f"{field} has the unknown value {value}")
