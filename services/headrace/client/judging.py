"""What the end of a call says, beyond its code: whether it fits the terminal event, and the details of its status."""

from __future__ import annotations

import contextlib
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headrace.client.errors import QuotaViolation
from headrace.client.events import FinishReason, Terminal
from headrace.control.errors import RULES, Failure, Reason

COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_EITHER = frozenset({FinishReason.CONTENT_FILTER, FinishReason.TOOL_CALLS, FinishReason.UNKNOWN})
"""Ends that are the caller's to judge: the status may be OK."""
_TRANSPORT_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"})
"""Codes that gRPC gives by itself when a connection or a deadline ends just after the terminal event."""
IS_REPLAY = ("headrace-idempotent-replay", "true")
"""Initial metadata of a call that repeats, or reads along with, what another call with its key began."""

ELSEWHERE = frozenset({Reason.DRAINING, Reason.NO_SNAPSHOT})
"""Refusals that another Router would not have given."""
RESUME_REFUSED = {
    Reason.NOT_FOUND: "the service no longer knows the request: it was kept too short a time, or the Router restarted",
    Reason.EVENTS_EXPIRED: "events after the last one that was read are no longer kept",
    Reason.NOT_RESUMABLE: "the service does not let this request be resumed",
}


def contradiction(terminal: Terminal, code: str, failure: Failure | None) -> str:
    """How the status of a call contradicts its terminal event; "" if it does not.

    A status without a reason of ours may be the transport's, which ended just after the event: the event is the truth.
    """
    finish = terminal.finish_reason
    if failure is None and code in _TRANSPORT_CODES:
        return ""
    if terminal.failure is None and finish in COMPLETE:
        agrees, expected = code == "OK", "OK"
    elif terminal.failure is None:
        agrees, expected = code != "OK" or finish in _EITHER, "an error"
    elif terminal.failure.reason is Reason.INTERNAL:  # also what a newer service's reasons become
        agrees, expected = code != "OK", "an error"
    else:
        expected = RULES[terminal.failure.reason].code
        agrees = code == expected and finish not in COMPLETE
    return "" if agrees else f"The service ended with {finish.name}, which means {expected}, and with status {code}."


def trailer(rpc_error: Any | None, key: str) -> str | None:
    """A trailer of a call that failed; None if it is not there."""
    if rpc_error is None:
        return None
    for name, value in rpc_error.trailing_metadata() or ():
        if name == key:
            return str(value)
    return None


def is_replay(metadata: Any) -> bool:
    """Whether the initial metadata of a call says that it repeats another one's request."""
    return any((name, value) == IS_REPLAY for name, value in metadata or ())


def quota_of(rpc_error: Any | None) -> tuple[QuotaViolation, ...]:
    """The limits that a status names as used up."""
    try:
        status = rpc_status.from_call(rpc_error) if rpc_error is not None else None
    except (ValueError, DecodeError):
        return ()
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details if status is not None else ():
        if detail.Is(quota.DESCRIPTOR):
            with contextlib.suppress(DecodeError):
                detail.Unpack(quota)
    return tuple(
        QuotaViolation(v.subject, v.description, v.quota_metric, v.quota_value if v.quota_value else None)
        for v in quota.violations
    )
