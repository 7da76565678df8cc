"""One request at the client's edge: the shell around `headrace.control.request.RequestMachine`.

Links call in (admission, output, end, loss). The call that reads the request takes the next event, writes it, and says
so; where no call reads, the event goes to the log alone. So the work per token is a slice, two appends and, when the
reader keeps up, one write.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.credit import CreditWindow, Reader
from headrace.control.errors import Failure, Reason
from headrace.control.event_log import EventLog, LoggedEvent
from headrace.control.holdings import ResourceLedger
from headrace.control.lifecycle import Finish
from headrace.control.origins import request_name
from headrace.control.request import RequestMachine, Step
from headrace.router import telling
from headrace.router.attempting import TIMER_SLACK_S, Attempting
from headrace.router.plan import Plan
from headrace.router.session_parts import Event, Owner, SessionReader
from headrace.router.telling import Logprob

LINGER_S = 5.0
"""How long the end of a request waits for a write that its reader holds up."""


def new_name(tag: str) -> str:
    """A name for a request of the Router with this tag."""
    return request_name(tag, secrets.token_hex(16))


class Session:
    """One request, over all its attempts and readers. Belongs to the event loop."""

    def __init__(self, plan: Plan, tenant: str, owner: Owner, ledger: ResourceLedger, name: str) -> None:
        self.name = name
        self.plan = plan
        self.tenant = tenant
        window, retries = CreditWindow(plan.window_tokens), owner.retrying.policy
        self.machine = RequestMachine(plan.budget, window, plan.terms, ledger, retries)
        self.log = EventLog(plan.retention) if plan.retention is not None else None
        self.received_at = time.time()
        """Unix time, for people."""
        self.reader: SessionReader | None = None
        self.followers: set[SessionReader] = set()
        """Calls that read the log beside the reader: it neither waits for them nor counts what they have."""
        self._owner = owner
        self._is_reported = False
        self._over: asyncio.Event | None = None
        place = functools.partial(owner.place, self)
        self._attempts = Attempting(self.name, plan, self.machine, self, place, owner.retrying)
        self._wants_logprobs = plan.generate.HasField("top_logprobs")
        self._text: list[bytes] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._alone_from = 0
        self._alone_bytes = 0
        left_s = plan.budget.remaining_s(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s + TIMER_SLACK_S, self.tick)

    @property
    def model(self) -> str:
        """Id of the model, for labels."""
        return self.plan.revision.model

    @property
    def is_over(self) -> bool:
        """Whether the end is decided and nothing is held in an engine."""
        return self.machine.is_over

    @property
    def avoided(self) -> list[str]:
        """Replicas that its next attempt does not go to."""
        return self._attempts.avoided

    @property
    def replicas(self) -> list[str]:
        """Replicas where an attempt of it runs, or ran last."""
        machine = self.machine
        last = machine.attempted[-1:]
        return [one.replica for one in machine.attempted if machine.runs(one.token)] or [one.replica for one in last]

    def failure(self) -> Failure | None:
        """Why it did not end well; None if it did, or runs."""
        finish = self.machine.record.finish
        return None if finish is None or finish.is_ok else telling.failure_of(self.machine, self._attempts.ended)

    def usage(self) -> pb.Usage:
        """What it has used so far, over all attempts."""
        return telling.usage(self.machine, self._attempts.ends)

    def attempt_records(self) -> list[pb.AttemptRecord]:
        """What became of each attempt so far."""
        ends = self._attempts.ends
        return [telling.attempt_record(one, ends.get(one.token)) for one in self.machine.attempted]

    def ends(self) -> list[tuple[str, scheduler_pb2.Ended]]:
        """What Schedulers have said of the ends of its attempts, by replica."""
        ends = self._attempts.ends
        return [(one.replica, ends[one.token]) for one in self.machine.attempted if one.token in ends]

    def start(self) -> None:
        """Dispatch the first attempt.

        Raises:
            Failure: nobody can take it.
        """
        self._attempts.start()

    def look(self) -> None:
        """See RequestOwner."""
        self._proceed()

    # The reader

    def attach(self, reader: SessionReader, kind: Reader, after_sequence: int) -> list[LoggedEvent]:
        """`reader` reads from behind `after_sequence` on. Returns the events that it missed.

        Raises:
            EventsExpired, UnknownSequence: they cannot be had.
        """
        missed: list[LoggedEvent] = []
        position = 0
        if self.log is not None:
            missed = self.log.after(after_sequence)
            position = self.log.tokens_through(after_sequence)
        previous, self.reader = self.reader, reader
        if previous is not None:
            previous.break_off(Failure(Reason.STREAM_TAKEN_OVER, "Another call has resumed this stream."))
        self.machine.attach(kind, position, time.monotonic())
        self._grant()  # to resume behind an event confirms it
        return missed

    def detach(self, reader: SessionReader) -> None:
        """The call is over, whatever ended it."""
        if self.reader is not reader:
            return
        self.reader = None
        if self.machine.detach(time.monotonic()):
            self._attempts.stop()
        if self.log is not None:
            self._alone_from, self._alone_bytes = self.log.last, 0
            self._grant()  # what the reader had not confirmed, the log has taken
        self._wake_followers()  # one of them may go on as the reader
        self._proceed()

    def take(self) -> Event | None:
        """The next event, to be written; None: nothing now. On the hot path."""
        machine = self.machine
        now = time.monotonic()
        if sequence := machine.tell_output(now):
            return self._event(Step.DELTA, sequence, now)
        while True:
            step = machine.next(now)
            if step is Step.WAIT or step is Step.OVER:
                self._attempts.await_retry()
                return None
            if step is Step.RETRY:
                self._attempts.again()
                continue
            sequence = machine.take(step)
            machine.writing_since = now
            self._report_if_over()
            if step is Step.REFUSED:
                return None
            return self._event(step, sequence, now)

    def writing(self) -> None:
        """A repeated event is being written."""
        self.machine.writing_since = time.monotonic()

    def wrote(self, sequence: int, tokens: int) -> None:
        """The transport has taken an event. On the hot path."""
        machine = self.machine
        machine.write(tokens, sequence)
        window = machine.window
        if window.granted - window.taken <= window.low:
            self._grant()

    def acknowledge(self, reader: SessionReader, sequence: int) -> None:
        """The reader confirms all events up to `sequence`; one whose stream was taken over confirms nothing."""
        if reader is not self.reader:
            return
        self.machine.window.acknowledge(min(sequence, self.machine.sequence))
        self._grant()

    def _grant(self) -> None:
        machine = self.machine
        is_paused = machine.window.paused_at is not None
        limit = machine.grant()
        if limit is not None:
            self._attempts.grant(limit, urgent=is_paused)

    def _event(self, step: Step, sequence: int, now: float) -> Event:
        machine = self.machine
        event = pb.GenerateEvent(sequence=sequence, request=self.name)
        tokens = 0
        if step is Step.DELTA:
            text, token_ids = self._text, self._token_ids
            tokens = len(token_ids)
            telling.delta(event, text[0] if len(text) == 1 else b"".join(text), token_ids, self._logprobs)
            self._clear_output()
        elif step is Step.ACCEPTED:
            assert self._attempts.admitted is not None
            telling.accepted(event, self.plan, machine, self._attempts.admitted)
        elif step is Step.RETRIED:
            telling.retried(event, machine.current.number)
        elif step is Step.CONTINUED:
            telling.continued(event, self.plan, machine.current.number)
        elif step is Step.PAUSED:
            telling.paused(event, machine.current.number)
        else:
            telling.terminal(event, machine, self._attempts.ends, now)
        data = event.SerializeToString()
        if self.log is not None:
            self.log.append(sequence, data, tokens)
            self._wake_followers()
        return Event(sequence, data, tokens)

    def _wake_followers(self) -> None:
        for follower in self.followers:
            follower.wake()

    def _clear_output(self) -> None:
        self._text.clear()
        self._token_ids.clear()
        if self._logprobs:
            self._logprobs.clear()

    def _log_on(self) -> None:
        """Without a reader: write to the log what there is, until half of what it keeps is unread."""
        machine, log = self.machine, self.log
        assert log is not None
        while (event := self.take()) is not None:
            self._alone_bytes += len(event.data)
            kept, unread = log.retention, log.last - self._alone_from
            machine.log_is_full = self._alone_bytes >= kept.bytes_max // 2 or unread >= kept.events_max // 2
            self.wrote(event.sequence, event.tokens)

    # The end

    def cancel(self) -> None:
        """The caller asks for the end."""
        self._ask_end(Reason.CLIENT_CANCELLED)

    def revoke(self) -> None:
        """What it runs on was revoked: nothing more of it is told."""
        if self.machine.ask_end(Reason.REVOKED, time.monotonic()):
            self._attempts.stop(Finish.CANCELLED)
        self._proceed()

    def drain(self) -> None:
        """Have the engine end it; what it has generated is still told."""
        if self.machine.wind_down(Reason.DRAINING, time.monotonic()):
            self._attempts.stop(Finish.CANCELLED)
        self._proceed()

    def tick(self) -> None:
        """Look at the time: at the deadline, and now and then."""
        now = time.monotonic()
        machine = self.machine
        if self.plan.is_shared and self.reader is not None and machine.reader_is_slow(now):
            # It ends the call, not the request: others may want that.
            self.reader.break_off(Failure(Reason.SLOW_CONSUMER, "The stream was not read for too long."))
            self.detach(self.reader)
        if machine.tick(now):
            self._attempts.stop()
        if machine.has_notice or (machine.record.finish is not None and not machine.is_told):
            self._proceed()
        since, record = machine.writing_since, machine.record
        if since is None or record.finish is None or self.reader is None:
            return
        if now - max(since, record.asked_at or since) >= LINGER_S:
            self.reader.break_off(
                self.failure() or Failure(Reason.SLOW_CONSUMER, "The end of the stream was not read.")
            )

    async def wait_over(self, timeout_s: float) -> None:
        """Wait until the engine has confirmed the end, at most `timeout_s` seconds."""
        if self.is_over:
            return
        if self._over is None:
            self._over = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Nobody reads it and nobody may come back."""
        self._timer.cancel()
        self._attempts.close()
        if self.log is not None:
            self.log.clear()
        self._clear_output()
        self.machine.close()

    def _ask_end(self, reason: Reason) -> None:
        if self.machine.ask_end(reason, time.monotonic()):
            self._attempts.stop()
        self._proceed()

    def _proceed(self) -> None:
        """Something changed: the reader looks, or the log goes on."""
        if self.machine.record.finish is not None and not self.machine.pending:
            self._clear_output()
        self._report_if_over()
        if self.reader is not None:
            self.reader.wake()
            return
        if self.log is not None:
            self._log_on()
        self._owner.release(self)

    def _report_if_over(self) -> None:
        if self._is_reported or not self.machine.is_over:
            return
        self._is_reported = True
        self._timer.cancel()
        self._attempts.close()
        self._attempts.known = None
        self._owner.retrying.finished(self.machine, time.monotonic())
        if self._over is not None:
            self._over.set()
        self._owner.on_over(self)

    # What links call

    def on_admitted(self, message: scheduler_pb2.Admitted) -> None:
        """See AttemptOwner."""
        now = time.monotonic()
        if self.machine.admitted(
            message.attempt, message.record_version, now, cached_tokens=message.cached_prompt_tokens
        ):
            self._attempts.sent[message.attempt].admitted = message
            self._proceed()

    def on_output(self, attempt: int, text: bytes, token_ids: Sequence[int], logprobs: Sequence[Logprob]) -> None:
        """See AttemptOwner. On the hot path."""
        if not self.machine.output(attempt, len(token_ids), time.monotonic()):
            return
        if self.machine.unstopped:
            self._attempts.stop_loser()
        if self._attempts.known is not None:
            self._attempts.known.add(token_ids, len(text))
        self._text.append(text)
        self._token_ids.extend(token_ids)
        if logprobs and self._wants_logprobs:
            self._logprobs.extend(logprobs)
        if self.reader is not None:
            self.reader.wake()
        elif self.log is not None:
            self._log_on()

    def on_ended(self, message: scheduler_pb2.Ended) -> bool:
        """See AttemptOwner."""
        end, now = telling.attempt_end(message), time.monotonic()
        if not self.machine.ended(message.attempt, message.record_version, end, now):
            return False
        self._attempts.sent[message.attempt].ended = message
        self._attempts.stop_loser()
        self._proceed()
        return True

    def on_lost(self, attempt: int) -> None:
        """See AttemptOwner."""
        if self.machine.runs(attempt):
            self.on_ended(telling.lost(self.machine, attempt))
