"""One request as its reader lives it, without any I/O: both clients feed it and do what it says.

    call opens -> begin_call()  seconds that the call may take
    message    -> take()        the event to hand on, or None
    call ends  -> end_call()    Outcome: the last event and the exception that follows it, or how long to wait
                                before another call

A terminal event is held until the status has come: it is handed on only when both tell the same story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import errors
from headrace.client.errors import Facts, HeadraceError
from headrace.client.events import (
    Accepted,
    Answer,
    Delta,
    Event,
    FinishReason,
    Terminal,
    TokenLogprob,
    event_from_proto,
)
from headrace.control.client_retry import AttemptFailure, RetryPolicy, decide_retry
from headrace.control.errors import RULES, Failure, Reason
from headrace.rpc import status

METHOD = "/headrace.api.inference.v1.InferenceService/Generate"

_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_EITHER = frozenset({FinishReason.CONTENT_FILTER, FinishReason.TOOL_CALLS, FinishReason.UNKNOWN})
"""Ends that are the caller's to judge: the status may be OK."""
_TRANSPORT_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"})
"""Codes that gRPC gives by itself when a connection or a deadline ends just after the terminal event."""


class Unreadable:
    """A message that is no GenerateEvent."""


def read_event(data: bytes) -> pb.GenerateEvent | Unreadable:
    """Deserialize without failing: gRPC would log the error and, in one client only, end the call with INTERNAL."""
    try:
        return pb.GenerateEvent.FromString(data)
    except DecodeError:
        return Unreadable()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows the end of a call: exactly one of `wait_s`, or the end of the request."""

    wait_s: float | None = None
    """Seconds to wait before another call."""
    terminal: Terminal | None = None
    error: HeadraceError | None = None


class Session:
    """State of one request over all its calls.

    Args:
        timeout_s: from the first call to the end; None for no deadline.
        retry: None means one call only.
        clock: monotonic seconds.
        draw: evenly from 0 to 1, for the jitter.
    """

    def __init__(
        self,
        *,
        timeout_s: float | None,
        retry: RetryPolicy | None,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._timeout_s = timeout_s
        self._retry = retry
        self._clock = clock
        self._draw = draw
        self._deadline: float | None = None
        self.calls = 0
        self._reset()

    def _reset(self) -> None:
        self._sequence = 0
        self._accepted: Accepted | None = None
        self._terminal: Terminal | None = None
        self._has_output = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def begin_call(self) -> float | None:
        """Count a call; returns the seconds that are left for it, None without a deadline."""
        self._reset()
        self.calls += 1
        if self.calls == 1 and self._timeout_s is not None:
            self._deadline = self._clock() + self._timeout_s
        return self._remaining_s()

    def take(self, message: pb.GenerateEvent | Unreadable) -> Event | None:
        """Take one message.

        Returns:
            What to hand on; None for a terminal event, which is held, and for what only newer services know.

        Raises:
            ProtocolError: the message breaks the stream's contract; SequenceGap if by its number.
        """
        if isinstance(message, Unreadable):
            raise self._broken("The service sent an event that cannot be read.")
        sequence = message.sequence
        if sequence != self._sequence + 1:
            facts = Facts(
                code=RULES[Reason.SEQUENCE_GAP].code,
                reason=Reason.SEQUENCE_GAP,
                metadata={"expectedSequence": str(self._sequence + 1), "gotSequence": str(sequence)},
            )
            text = (
                f"Event {sequence} arrived where event {self._sequence + 1} was expected; the stream cannot be trusted."
            )
            raise self._complete(errors.SequenceGap(text, facts))
        if self._terminal is not None:
            raise self._broken("The service sent an event after the terminal one.")
        self._sequence = sequence
        event = event_from_proto(message)
        if isinstance(event, Delta):
            if self._accepted is None:
                raise self._broken("The service sent output before it accepted the request.")
            self._has_output = True
            self._texts.append(event.text)
            self._token_ids.extend(event.token_ids)
            if event.logprobs:
                self._logprobs.extend(event.logprobs)
        elif isinstance(event, Terminal):
            self._terminal = event
            return None
        elif isinstance(event, Accepted):
            self._accepted = event
        return event

    def end_call(self, rpc_error: Any | None) -> Outcome:
        """Judge how a call ended.

        Args:
            rpc_error: gRPC's error, or None for status OK.
        """
        failure = status.from_rpc_error(rpc_error) if rpc_error is not None else None
        code = rpc_error.code().name if rpc_error is not None else "OK"
        terminal = self._terminal
        if terminal is not None:
            if contradiction := _contradiction(terminal, code, failure):
                return Outcome(error=self._broken(contradiction))
            if code == "OK" or terminal.finish_reason in _COMPLETE:
                return Outcome(terminal=terminal)
            failure = terminal.failure or failure
        elif rpc_error is None:
            return Outcome(error=self._broken("The service ended the stream without a terminal event."))
        wait_s = self._wait_s(code, failure, rpc_error)
        if wait_s is not None:
            return Outcome(wait_s=wait_s)
        if failure is not None:
            error = errors.from_failure(failure, output=self._has_output)
        else:
            error = errors.from_code(
                code, rpc_error.details() if rpc_error is not None else "", output=self._has_output
            )
        error.__cause__ = rpc_error
        return Outcome(terminal=terminal, error=self._complete(error))

    def cancelled(self) -> HeadraceError:
        """Build the exception for a request that the caller ended."""
        facts = Facts(code="CANCELLED", reason=Reason.CLIENT_CANCELLED)
        return self._complete(errors.Cancelled("The request was cancelled by its caller.", facts))

    def answer(self) -> Answer:
        """What has arrived."""
        accepted, terminal = self._accepted, self._terminal
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=terminal.finish_reason if terminal else None,
            stop=terminal.stop if terminal else None,
            usage=terminal.usage if terminal else None,
            timing=terminal.timing if terminal else None,
            request=accepted.request if accepted else "",
            revision=accepted.revision if accepted else "",
            replica=accepted.replica if accepted else "",
            attempts=terminal.attempts if terminal else (accepted.attempt if accepted else 0),
            effective_effort=accepted.effective_effort if accepted else None,
        )

    def _wait_s(self, code: str, failure: Failure | None, rpc_error: Any | None) -> float | None:
        attempt = AttemptFailure(
            code=code,
            reason=failure.reason if failure else None,
            accepted=self._accepted is not None,
            output=self._has_output,
            retry_after_s=failure.retry_after_s if failure else None,
            pushback=_trailer(rpc_error, status.PUSHBACK),
        )
        return decide_retry(
            self._retry, attempt, attempts=self.calls, remaining_s=self._remaining_s(), jitter=self._draw()
        )

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def _broken(self, message: str) -> HeadraceError:
        return self._complete(errors.ProtocolError(message))

    def _complete(self, error: HeadraceError) -> HeadraceError:
        error.answer = self.answer()
        error.calls = self.calls
        return error


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a deadline that has passed before any call is made.

    Raises:
        DeadlineExceeded: names timeout_s.
    """
    if timeout_s is not None and not timeout_s > 0:
        facts = Facts(code="DEADLINE_EXCEEDED", reason=Reason.DEADLINE_EXCEEDED, field="timeout_s")
        raise errors.DeadlineExceeded(f"timeout_s is {timeout_s:g}: no time is left, and no call was made.", facts)


def _contradiction(terminal: Terminal, code: str, failure: Failure | None) -> str:
    """How the status of a call contradicts its terminal event; "" if it does not.

    A status without a reason of ours may be the transport's, which ended just after the event: the event is the truth.
    """
    finish = terminal.finish_reason
    if failure is None and code in _TRANSPORT_CODES:
        return ""
    if terminal.failure is None and finish in _COMPLETE:
        agrees, expected = code == "OK", "OK"
    elif terminal.failure is None:
        agrees, expected = code != "OK" or finish in _EITHER, "an error"
    elif terminal.failure.reason is Reason.INTERNAL:  # also what a newer service's reasons become
        agrees, expected = code != "OK", "an error"
    else:
        expected = RULES[terminal.failure.reason].code
        agrees = code == expected and finish not in _COMPLETE
    return "" if agrees else f"The service ended with {finish.name}, which means {expected}, and with status {code}."


def _trailer(rpc_error: Any | None, key: str) -> str | None:
    if rpc_error is None:
        return None
    for name, value in rpc_error.trailing_metadata() or ():
        if name == key:
            return str(value)
    return None
