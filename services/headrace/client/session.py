"""One request as its reader lives it, without any I/O: both clients feed it and do what it says.

    call opens -> begin_call()  the call to make, and how long it may take
    message    -> take()        the event to hand on, or None
    read on    -> consumed()    the sequence to acknowledge, if any; look() after `look_at`
    call ends  -> end_call()    Outcome: the last event and the exception that follows it, or how long to wait
                                before another call, which asks again or goes on with the same request

A terminal event is held until the status has come: it is handed on only when both tell the same story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import errors, judging
from headrace.client.acknowledging import Acknowledging
from headrace.client.calls import Opening, Unreadable
from headrace.client.errors import Facts, HeadraceError, ProtocolError
from headrace.client.events import Accepted, Answer, Delta, Event, ResumePoint, Terminal
from headrace.client.targets import Turn
from headrace.client.transcript import Transcript
from headrace.control.client_retry import (
    AttemptFailure,
    BrokenStream,
    RetryPolicy,
    decide_resume,
    decide_retry,
    is_lost,
    is_refusal,
    is_resumable,
)
from headrace.control.client_throttle import is_shed
from headrace.control.errors import Failure, Reason
from headrace.rpc import status

RESUME_S = 30.0
"""How long to try to resume where `accepted`, which says it, was read elsewhere."""

_AGAIN = "-again"


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
        request: what to start, or what to go on with.
        is_interactive: whether what was read is acknowledged.
        timeout_s: from the first call to the end; None for no deadline.
        retry: None means that nothing is asked for twice; a broken stream is resumed all the same.
        clock: monotonic seconds.
        draw: evenly from 0 to 1, for the jitter.
        turn: the Routers that its calls may go to.
        own_key: idempotency key for a request that has none, so that it may fail over; "" gives it none.
    """

    def __init__(
        self,
        request: pb.GenerateRequest | pb.ResumeGenerateRequest,
        *,
        is_interactive: bool,
        timeout_s: float | None,
        retry: RetryPolicy | None,
        clock: Callable[[], float],
        draw: Callable[[], float],
        turn: Turn,
        own_key: str = "",
    ) -> None:
        self._request = request
        self._is_interactive = is_interactive
        self._timeout_s = timeout_s
        self._retry = retry
        self._clock = clock
        self._draw = draw
        self._turn = turn
        self._deadline: float | None = None
        self.calls = 0
        self._refusals = 0
        self.is_over = False
        """Whether the request has ended as far as its reader can know, or is none of its business any more."""
        self._acknowledging = Acknowledging()
        self._is_kept = True
        self._is_own_key = self._has_new_key = False
        if isinstance(request, pb.ResumeGenerateRequest):
            self._transcript = Transcript(request.request, request.after_sequence)
        else:
            self._transcript = Transcript()
            self._is_kept = request.on_disconnect == pb.ON_DISCONNECT_CONTINUE
            self._is_own_key = bool(own_key) and not request.idempotency_key and turn.may_make_keys
            if self._is_own_key:
                request.idempotency_key = own_key
        self._has_key = isinstance(request, pb.GenerateRequest) and bool(request.idempotency_key)
        self.has_failed_over = False
        """Whether more than one Router may have the request."""
        self.is_replay = False
        """Whether the service repeats, or reads along with, what another call with the same idempotency key began."""
        self._is_resuming = isinstance(request, pb.ResumeGenerateRequest)
        self._is_located = False
        """Whether the target of the latest call is known to have the request."""
        self._is_gone = False
        """Whether the service has said that nobody can go on with it."""
        self._sequence_before = self._transcript.sequence
        self._failures = 0
        self._broken_at = 0.0

    def begin_call(self) -> Opening:
        """Count a call, and say what it is.

        Raises:
            Throttled: it is not to be made.
        """
        if self._turn.index < 0 or not self._is_located:
            self._turn.next()
        if not self._is_resuming:
            self._transcript = Transcript()
            if not self._turn.send(is_retry=self.calls > 0):
                self.is_over = True
                text = "Too many requests of this client were refused of late; this one was not sent."
                raise self._complete(errors.Throttled(text))
        self._sequence_before = self._transcript.sequence
        self._acknowledging.restart()
        self.calls += 1
        if self.calls == 1 and self._timeout_s is not None:
            self._deadline = self._clock() + self._timeout_s
        message = self._request
        if self._is_resuming:
            message = pb.ResumeGenerateRequest(
                request=self._transcript.request, after_sequence=self._transcript.sequence
            )
        return Opening(message, self._remaining_s(), self._is_interactive, self._turn.index)

    def opened(self, metadata: Any) -> None:
        """The first message of a call is here; `metadata` came before it."""
        self._turn.answered()
        if not self._is_resuming:
            self.is_replay = judging.is_replay(metadata)

    def take(self, message: pb.GenerateEvent | Unreadable) -> Event | None:
        """Take one message. On the hot path.

        Returns:
            What to hand on; None for a terminal event, which is held, and for what only newer services know.

        Raises:
            ProtocolError: the message breaks the stream's contract; SequenceGap if by its number.
        """
        try:
            event = self._transcript.take(message)
        except ProtocolError as error:
            raise self._complete(error) from None
        if isinstance(event, Accepted):
            self._acknowledging.window(event.window_tokens)
        return event

    def consumed(self, event: Event) -> int | None:
        """The caller has asked for the event after this one; returns the sequence to acknowledge now, if any."""
        if not isinstance(event, Delta):
            return None
        return self._acknowledging.consume(event.sequence, len(event.token_ids), self._clock())

    @property
    def look_at(self) -> float | None:
        """When to `look`, by the clock."""
        return self._acknowledging.due_at

    def look(self) -> int | None:
        """Time has passed; returns the sequence to acknowledge now, if any."""
        return self._acknowledging.look(self._clock())

    def end_call(self, rpc_error: Any | None) -> Outcome:
        """Judge how a call ended.

        Args:
            rpc_error: gRPC's error, or None for status OK.
        """
        outcome = self._judge(rpc_error)
        self.is_over = outcome.wait_s is None
        return outcome

    def _judge(self, rpc_error: Any | None) -> Outcome:
        failure = status.from_rpc_error(rpc_error) if rpc_error is not None else None
        code = rpc_error.code().name if rpc_error is not None else "OK"
        self._notice_target(code, failure)
        terminal = self._transcript.terminal
        if terminal is not None:
            if disagreement := judging.contradiction(terminal, code, failure):
                return Outcome(error=self._broken(disagreement))
            if code == "OK" or terminal.finish_reason in judging.COMPLETE:
                return Outcome(terminal=terminal)
            failure = terminal.failure or failure
        elif rpc_error is None:
            return Outcome(error=self._broken("The service ended the stream without a terminal event."))
        elif (resumed := self._resume(code, failure, judging.trailer(rpc_error, status.PUSHBACK))) is not None:
            return resumed
        if failure is not None and failure.reason is Reason.STORE_UNAVAILABLE and self._drops_key():
            return Outcome(wait_s=0.0)
        if failure is not None and failure.reason is Reason.IDEMPOTENCY_ORIGIN_LOST and self._renews_key():
            return Outcome(wait_s=0.0)
        wait_s = self._retry_wait_s(code, failure, rpc_error)
        if wait_s is not None:
            self._is_located = self._is_resuming = False
            return Outcome(wait_s=wait_s)
        if failure is not None:
            error = errors.from_failure(failure, output=self._transcript.has_output, quota=judging.quota_of(rpc_error))
        else:
            details = rpc_error.details() if rpc_error is not None else ""
            error = errors.from_code(code, details, output=self._transcript.has_output)
        error.__cause__ = rpc_error
        return Outcome(terminal=terminal, error=self._complete(error))

    def _resume(self, code: str, failure: Failure | None, pushback: str | None) -> Outcome | None:
        """Judge a call that ended before its request did; None where nothing is to be gone on with."""
        reason = failure.reason if failure else None
        started_elsewhere = isinstance(self._request, pb.ResumeGenerateRequest)
        has_read = self._transcript.sequence > self._sequence_before
        self._is_located = self._is_located or has_read
        if not self.can_resume:
            return None
        if started_elsewhere and not self._is_located:
            if reason is Reason.NOT_FOUND and self.calls < self._turn.count:
                return Outcome(wait_s=0.0)
            if reason is not None or self.calls >= self._calls_max:
                return None
        if has_read:
            self._failures = 0
        if not is_resumable(code, reason):
            why = judging.RESUME_REFUSED.get(reason) if reason and self._is_resuming and self._is_located else None
            self._is_gone = why is not None
            return Outcome(error=self._lost(code, why)) if why else None
        if not self._failures:
            self._broken_at = self._clock()
        self._failures += 1
        if self._failures > 1 and self._may_fail_over and not self._transcript.has_output and reason is None:
            return None  # it was tried where it was, and another Router finds it by its key
        self._is_resuming = True
        accepted = self._transcript.accepted
        broken = BrokenStream(
            code=code,
            reason=reason,
            failures=self._failures,
            broken_s=self._clock() - self._broken_at,
            window_s=accepted.retention.window_s if accepted and accepted.retention else RESUME_S,
            retry_after_s=failure.retry_after_s if failure else None,
            pushback=pushback,
        )
        wait_s = decide_resume(
            self._retry or RetryPolicy(), broken, remaining_s=self._remaining_s(), jitter=self._draw()
        )
        if wait_s is None:
            why = "the service was out of reach, or asked to be left alone, until its window or the deadline had passed"
            return Outcome(error=self._lost(code, why))
        return Outcome(wait_s=wait_s)

    @property
    def can_resume(self) -> bool:
        """Whether another call could go on with the request."""
        if isinstance(self._request, pb.ResumeGenerateRequest) or self._is_gone:
            return not self._is_gone
        accepted = self._transcript.accepted
        return self._is_kept and accepted is not None and accepted.retention is not None

    @property
    def outlives_calls(self) -> bool:
        """Whether the request may run on at the service when its call is ended."""
        runs_on = self._is_kept or self._has_key
        return runs_on and self.calls > 0 and not self.is_over and self._transcript.terminal is None

    @property
    def request_name(self) -> str:
        """Name of the request; "" while it is not known."""
        return self._transcript.request

    @property
    def has_terminal(self) -> bool:
        """Whether the terminal event is here."""
        return self._transcript.terminal is not None

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where another reader would go on; None if it could not."""
        if not self.can_resume:
            return None
        is_held = self.has_terminal and not self.is_over
        return ResumePoint(self.request_name, self._transcript.sequence - is_held)

    def cancelled(self) -> HeadraceError:
        """Build the exception for a request that the caller ended."""
        facts = Facts(code="CANCELLED", reason=Reason.CLIENT_CANCELLED)
        return self._complete(errors.Cancelled("The request was cancelled by its caller.", facts))

    def detached(self) -> HeadraceError:
        """Build the exception for a stream that the caller left running."""
        return self._complete(errors.Detached(f"The stream was detached; {self.request_name} runs on."))

    def answer(self) -> Answer:
        """What has arrived."""
        return self._transcript.answer()

    @property
    def _calls_max(self) -> int:
        return max(self._turn.count, self._retry.attempts_max if self._retry else 1)

    def _retry_wait_s(self, code: str, failure: Failure | None, rpc_error: Any | None) -> float | None:
        if isinstance(self._request, pb.ResumeGenerateRequest):
            return None
        attempt = AttemptFailure(
            code=code,
            reason=failure.reason if failure else None,
            begun=self._transcript.sequence > 0,
            output=self._transcript.has_output,
            retry_after_s=failure.retry_after_s if failure else None,
            pushback=judging.trailer(rpc_error, status.PUSHBACK),
        )
        is_free = is_refusal(attempt, refusals=self._refusals)
        self._refusals += is_free
        fails_over = self._may_fail_over and is_lost(attempt)
        wait_s = decide_retry(
            self._retry,
            attempt,
            attempts=self.calls,
            refusals=self._refusals,
            remaining_s=self._remaining_s(),
            jitter=self._draw(),
            may_fail_over=fails_over,
        )
        if wait_s is None or not (is_free or fails_over or self._turn.retry()):
            return None
        self.has_failed_over = self.has_failed_over or fails_over
        return wait_s

    def _drops_key(self) -> bool:
        """The store of keys cannot be reached: a request that asked for none goes without, as it would have."""
        if not self._is_own_key or self._transcript.sequence:
            return False
        assert isinstance(self._request, pb.GenerateRequest)
        self._turn.no_keys()
        self._request.idempotency_key = ""
        self._is_own_key = self._has_key = False
        return True

    def _renews_key(self) -> bool:
        """The Router that was failed over from is gone, and its attempt with it; once, it may run again.

        Only where the key is this client's own, so that nobody else can have read anything of it either.
        """
        if not self._is_own_key or not self.has_failed_over or self._has_new_key or self._transcript.has_output:
            return False
        assert isinstance(self._request, pb.GenerateRequest)
        self._request.idempotency_key += _AGAIN
        self._has_new_key = True
        self._is_located = self._is_resuming = False
        return True

    @property
    def _may_fail_over(self) -> bool:
        retry = self._retry
        may_call = retry is not None and retry.fails_over and self.calls < retry.attempts_max
        return may_call and self._has_key and self._turn.count > 1 and not self.has_failed_over

    def _notice_target(self, code: str, failure: Failure | None) -> None:
        """Remember, for all requests, what the end of this call says of its Router."""
        reason = failure.reason if failure is not None else None
        if is_shed(reason) and not self._transcript.sequence:
            self._turn.shed()
        elif reason in judging.ELSEWHERE or (reason is None and code == "UNAVAILABLE"):
            self._turn.lost()
        elif reason is not None:
            self._turn.answered()

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def _lost(self, code: str, why: str) -> HeadraceError:
        text = f"The connection was lost and the stream could not be resumed: {why}."
        return self._complete(errors.Interrupted(text, Facts(code=code)))

    def _broken(self, message: str) -> HeadraceError:
        return self._complete(ProtocolError(message))

    def _complete(self, error: HeadraceError) -> HeadraceError:
        error.answer = self.answer()
        error.calls = self.calls
        return error
