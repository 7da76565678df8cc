"""One request at the client's edge: its record, its numbered events, and its one end.

The link calls in (output, end, loss); the handler's task wakes, puts all that waits into one event and writes it.
So the work per token is a slice, two appends and, when the client keeps up, one write.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.errors import Failure, Reason, Retry
from headrace.control.lifecycle import Finish, RequestRecord
from headrace.control.resources import Replica
from headrace.router.links import SchedulerLink
from headrace.rpc import status

FINISH_NUMBER: dict[Finish, Any] = {f: inference_pb2.FinishReason.Value(f"FINISH_REASON_{f.name}") for f in Finish}
_FINISH = {number: finish for finish, number in FINISH_NUMBER.items()}

Clock = Callable[[], float]
"""Monotonic seconds."""


class Session:
    """What one Generate call is about. Owned by its handler's task; links call its `on_` methods in between."""

    def __init__(self, *, now: float, window: int, clock: Clock, on_settled: Callable[[Session], None]) -> None:
        self.name = f"requests/{secrets.token_hex(8)}"
        self.record = RequestRecord(received_at=now)
        self.sequence = 0
        self.ended: scheduler_pb2.Ended | None = None
        self.late_messages = 0
        self.model = ""
        self._clock = clock
        self._on_settled: Callable[[Session], None] | None = on_settled
        self._early: Finish | None = None
        self._window = window
        self._granted = window
        self._link: SchedulerLink | None = None
        self._wants_logprobs = False
        self._admitted: scheduler_pb2.Admitted | None = None
        self._text: list[bytes] = []
        self._token_ids: list[int] = []
        self._logprobs: list[tuple[float, list[tuple[int, float]]]] = []
        self._wake = asyncio.Event()

    # What the handler's task calls

    def dispatch(
        self,
        link: SchedulerLink,
        replica: Replica,
        generate: inference_pb2.GenerateRequest,
        *,
        output_tokens_max: int,
        remaining_s: float,
    ) -> None:
        """Start an attempt on `replica` through `link`."""
        attempt = secrets.randbits(62) + 1
        started = self.record.dispatch(attempt, replica.name)
        assert started, "dispatched a request that has output or is over"
        self._wants_logprobs = generate.HasField("top_logprobs")
        self.model = replica.revision.split("/")[1]
        self._link = link
        self._granted = self._window
        self._admitted = None
        self.ended = None
        message = scheduler_pb2.Dispatch(
            attempt=attempt,
            request=self.name,
            revision=replica.revision,
            replica=replica.name,
            epoch=replica.epoch,
            generate=generate,
            credit_limit=self._granted,
            output_tokens_max=output_tokens_max,
        )
        message.remaining.FromMicroseconds(max(0, int(remaining_s * 1e6)))
        link.dispatch(message, self)

    async def wait(self) -> None:
        """Wait until there is something to tell the client."""
        await self._wake.wait()
        self._wake.clear()

    @property
    def has_output(self) -> bool:
        """Whether output came in since the last take; the link has then set the wake-up too."""
        return bool(self._token_ids or self._text)

    def take_admitted(self) -> scheduler_pb2.Admitted | None:
        """The news that the engine has begun, once an attempt."""
        admitted, self._admitted = self._admitted, None
        return admitted

    def take_delta(self) -> inference_pb2.GenerateEvent | None:
        """All output that waits, as one event; None if there is none. On the hot path."""
        if not self._token_ids and not self._text:
            return None
        event = self.event()
        delta = event.delta
        delta.text = b"".join(self._text).decode("utf-8")
        delta.token_ids.extend(self._token_ids)
        if self._logprobs:
            for token_id, (logprob, alternatives) in zip(self._token_ids, self._logprobs, strict=True):
                entry = delta.logprobs.add(token_id=token_id, logprob=logprob)
                for other_id, other_logprob in alternatives:
                    entry.alternatives.add(token_id=other_id, logprob=other_logprob)
            self._logprobs.clear()
        self._text.clear()
        self._token_ids.clear()
        return event

    def event(self) -> inference_pb2.GenerateEvent:
        """The next numbered event, to be filled in."""
        self.sequence += 1
        return inference_pb2.GenerateEvent(sequence=self.sequence, request=self.name)

    def sent(self, tokens: int) -> None:
        """The transport has taken `tokens`; give the engine room once half of the window is used."""
        record = self.record
        record.sent_tokens += tokens
        limit = record.sent_tokens + self._window
        if limit - self._granted >= self._window // 2 and self.ended is None and self._link is not None:
            self._granted = limit
            self._link.grant(record.attempt, limit)

    def abandon(self, cause: Finish) -> None:
        """End the request as `cause` unless it has an end, and make the engine let go of what still runs."""
        if self.record.end(cause) and self._link is not None and self.ended is None and self.record.attempt:
            self._link.cancel(self.record.attempt, FINISH_NUMBER[cause])
        self.settle()

    def end_early(self, cause: Finish) -> None:
        """Have the engine end the attempt; the request then ends as `cause`, with a terminal event of its own."""
        if self.ended is None and self._link is not None:
            self._early = cause
            self._link.cancel(self.record.attempt, FINISH_NUMBER[Finish.CANCELLED])

    def expire(self) -> None:
        """The deadline has passed: end here, whatever the Scheduler does. It was told to end a little earlier."""
        if self.ended is None and self._link is not None and self.record.finish is None:
            number = FINISH_NUMBER[Finish.DEADLINE_EXCEEDED]
            self._link.cancel(self.record.attempt, number)
            self.on_ended(scheduler_pb2.Ended(attempt=self.record.attempt, reason=number))

    def outcome(self) -> Finish:
        """How the attempt that has ended ends the request."""
        assert self.ended is not None
        finish = finish_of(self.ended)
        return self._early if self._early is not None and finish is Finish.CANCELLED else finish

    def settle(self) -> None:
        """Report the request once: its end is decided and the engine has confirmed that nothing is held."""
        if (
            self._on_settled is not None
            and self.record.finish is not None
            and (self.ended is not None or not self.record.attempt)
        ):
            report, self._on_settled = self._on_settled, None
            report(self)

    def is_retryable(self, attempts_max: int) -> bool:
        """Whether the attempt that has just ended may be repeated elsewhere."""
        if self.ended is None or not self.record.may_retry(attempts_max):
            return False
        failure = status.from_proto(self.ended.error)
        return self.ended.HasField("error") and failure.rule.retry is Retry.ROUTER

    def usage(self) -> inference_pb2.Usage:
        """What the request used, by the engine's count; by ours where the engine was lost."""
        usage = inference_pb2.Usage()
        if self.ended is not None and self.ended.HasField("usage"):
            usage.CopyFrom(self.ended.usage)
        else:
            usage.generated_tokens = self.record.output_tokens
        usage.sent_tokens = self.record.sent_tokens
        return usage

    def timing(self, now: float) -> inference_pb2.Timing:
        """Where the time went."""
        record = self.record
        timing = inference_pb2.Timing(total=_duration(now - record.received_at))
        if record.admitted_at is not None:
            timing.queue.CopyFrom(_duration(record.admitted_at - record.received_at))
        ttft_s, tpot_s = record.time_to_first_token_s(), record.time_per_output_token_s()
        if ttft_s is not None:
            timing.time_to_first_token.CopyFrom(_duration(ttft_s))
        if tpot_s is not None:
            timing.time_per_output_token.CopyFrom(_duration(tpot_s))
        return timing

    # What links call

    def on_admitted(self, message: scheduler_pb2.Admitted) -> None:
        """See AttemptOwner."""
        if self.record.admit(message.attempt, self._clock()):
            self._admitted = message
            self._wake.set()
        else:
            self.late_messages += 1

    def on_output(
        self,
        attempt: int,
        text: bytes,
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[float, list[tuple[int, float]]]],
    ) -> None:
        """See AttemptOwner. On the hot path."""
        if self.record.output(attempt, len(token_ids), self._clock()):
            self._text.append(text)
            self._token_ids.extend(token_ids)
            if logprobs and self._wants_logprobs:
                self._logprobs.extend(logprobs)
            self._wake.set()
        else:
            self.late_messages += 1

    def on_ended(self, message: scheduler_pb2.Ended) -> None:
        """See AttemptOwner."""
        if message.attempt == self.record.attempt and self.ended is None:
            self.ended = message
            self._wake.set()
            self.settle()
        else:
            self.late_messages += 1

    def on_lost(self, attempt: int) -> None:
        """See AttemptOwner."""
        lost_before = self.record.first_output_at is None
        failure = (
            Failure(
                Reason.WORKER_LOST_BEFORE_OUTPUT,
                "The worker was lost before any output; send the request again.",
            )
            if lost_before
            else interrupted(self.record.output_tokens)
        )
        self.on_ended(
            scheduler_pb2.Ended(
                attempt=attempt,
                reason=FINISH_NUMBER[Finish.FAILED if lost_before else Finish.INTERRUPTED],
                error=status.to_proto(failure),
            )
        )


def finish_of(ended: scheduler_pb2.Ended) -> Finish:
    """How an attempt ended; an unknown number is a failure."""
    return _FINISH.get(ended.reason, Finish.FAILED)


def interrupted(tokens: int) -> Failure:
    """The failure of a stream that was cut after `tokens` tokens of output."""
    return Failure(
        Reason.STREAM_INTERRUPTED,
        "The worker was lost after output had been sent; nothing is replayed.",
        metadata={"outputTokens": str(tokens)},
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(max(0, round(seconds * 1e6)))
    return duration
