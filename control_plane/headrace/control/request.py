"""One request at the Router: what it is told, what its reader is told next, its one end, and its releases.

    facts in                            what follows
    dispatch, admitted, output, ended   next() says what the reader is told: an event, a retry, the end
    hedge                               a rival beside the attempt that counts: headrace.control.hedge
    write, acknowledge, attach, detach  grant() says what the engine may generate
    ask_end, wind_down, tick            True: the engine has to be told to stop

The end is decided by whoever comes first: what the engine says, once all its output has been told; or this side, at
once, and then what still waits is dropped. The terminal event follows when the engine has confirmed that slot and KV
are free, so that its counts are final; it does not wait longer than CONFIRM_S for that.

Sans-io: it counts tokens and never sees one. Router and simulator run this same class.
"""

from __future__ import annotations

from headrace.control.backoff import Retries
from headrace.control.continuation import is_due, is_given_up
from headrace.control.credit import CreditWindow, Reader
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.holdings import Resource, ResourceLedger
from headrace.control.lifecycle import FINISH_OF, Finish, RequestRecord
from headrace.control.request_attempts import RequestAttempts
from headrace.control.steps import AttemptEnd, Step, Terms

__all__ = ["CONFIRM_S", "PAUSED_NOTICE_S", "AttemptEnd", "RequestMachine", "Step", "Terms"]

CONFIRM_S = 2.0
"""How long a terminal event waits for the engine's confirmation."""
PAUSED_NOTICE_S = 1.0
"""After this long without credit the reader is told that generation waits for it."""


class RequestMachine(RequestAttempts):
    """See the module. Invariants: one attempt counts, at most one more runs; nothing is told after the terminal event.

    Args:
        budget: its limits of time.
        window: its credit.
        terms: what else is fixed for it.
        ledger: counts what all requests hold.
        retries: when it is tried again; None: at once, as often as `terms` says.
    """

    def __init__(
        self,
        budget: Budget,
        window: CreditWindow,
        terms: Terms,
        ledger: ResourceLedger,
        retries: Retries | None = None,
    ) -> None:
        super().__init__(RequestRecord(received_at=budget.received_at), window, ledger)
        self.budget = budget
        self.holdings.hold(Resource.SEND_BUFFER, Resource.TRACE)
        self.sequence = 0
        """Of the newest event."""
        self.dropped = 0
        """Tokens that arrived and were never told, because the end came first."""
        self.detached_at: float | None = None
        """Since when nobody reads; None: somebody does."""
        self.log_is_full = False
        """Whether, without a reader, no more may be written."""
        self.writing_since: float | None = None
        """When the write that is under way began."""
        self.refused_retry = ""
        """Why there was no other attempt although one was allowed: "budget", or ""."""
        self._terms = terms
        self._retries = retries
        self._was_accepted = False
        self._notice_due: bool | None = False
        """None: told in this pause."""
        self._is_told = False

    # What it is like

    @property
    def has_notice(self) -> bool:
        """Whether the reader is to be told that generation waits for it."""
        return self._notice_due is True

    @property
    def is_quiet(self) -> bool:
        """Whether there is certainly nothing to tell now; cheaper than `next`. On the hot path."""
        is_told = not self._pending and not self._has_text and not self._has_news
        return is_told and self._end is None and self.record.finish is None

    @property
    def is_told(self) -> bool:
        """Whether the end has been told: nothing comes any more."""
        return self._is_told

    @property
    def pending(self) -> int:
        """Tokens that arrived and were not told yet."""
        return self._pending

    # The end

    def ask_end(self, reason: Reason, now: float) -> bool:
        """End the request now, for a reason of this side's; the first end stands.

        Returns:
            Whether the engine has to be told to stop.
        """
        if not self.record.end(FINISH_OF[reason], reason):
            return False
        self.dropped += self._pending
        self._pending = 0
        self._has_text = False
        return self._ask(now)

    def wind_down(self, reason: Reason, now: float) -> bool:
        """Have the engine stop, and end for `reason` once it has; what it had generated is still told.

        Returns:
            Whether the engine has to be told to stop.
        """
        if self.record.finish is not None or self._early is not None:
            return False
        if not self._is_running and (self._end is None or self.retry_at is not None):  # there is nothing to wait for
            return self.ask_end(reason, now)
        self._early = reason
        return self._ask(now)

    def _ask(self, now: float) -> bool:
        if self.record.asked_at is None:
            self.record.asked_at = now
        self.retry_at = None
        if self._beside is not None and self._beside.is_rival:
            self._beside.lost_at = now
        return self.is_running

    def give_up(self, why: str = "") -> None:
        """Nobody else can take it, or may: what the last attempt said is the end. `why`: see `refused_retry`."""
        assert self._end is not None
        self.retry_at = None
        self.refused_retry = why
        self._conclude(self._end)

    def tick(self, now: float) -> bool:
        """Look at the time. Returns whether the engine has to be told to stop."""
        if self.record.finish is not None:
            return False
        admitted_at = self._began_at if self.retry_at is not None else self.record.admitted_at
        reason = self.budget.passed(now, admitted_at=admitted_at)
        is_ended = not self._is_running and self._end is not None and self.retry_at is None
        if reason is not Reason.DEADLINE_EXCEEDED and is_ended:
            reason = None  # the attempt is over: what is left is to tell it
        reason = reason or self._reader_passed(now)
        return self.ask_end(reason, now) if reason is not None else False

    def _reader_passed(self, now: float) -> Reason | None:
        terms = self._terms
        if self.detached_at is not None:
            gone = terms.resume_s is not None and now - self.detached_at >= terms.resume_s
            return Reason.CLIENT_DISCONNECTED if gone else None
        since = self.stalled_since
        if since is None:
            self._notice_due = False
            return None
        if now - since >= terms.slow_consumer_s:
            return Reason.SLOW_CONSUMER
        if self._notice_due is False and now - since >= PAUSED_NOTICE_S:
            self._notice_due = True
        return None

    @property
    def stalled_since(self) -> float | None:
        """Since when generation or a write waits for the reader; None: neither does."""
        paused, writing = self.window.paused_at, self.writing_since
        if paused is None or writing is None:
            return writing if paused is None else paused
        return min(paused, writing)

    def reader_is_slow(self, now: float) -> bool:
        """Whether the reader has let generation or a write wait for as long as it may, and no end is decided."""
        since = self.stalled_since
        return since is not None and self.record.finish is None and now - since >= self._terms.slow_consumer_s

    # The reader

    def attach(self, reader: Reader, position: int, now: float) -> None:
        """A call reads the events, from behind `position` tokens of the answer on."""
        self.window.attach(reader, position)
        self.detached_at = None
        self.log_is_full = False
        self.writing_since = None
        if self.window.paused_at is not None:
            self.window.paused_at = now  # the new reader has all the patience that the old one had

    def detach(self, now: float) -> bool:
        """The call is over. Returns whether the engine has to be told to stop.

        A request that nobody reads runs on only if it was made to be resumed.
        """
        self.writing_since = None
        self.detached_at = now
        if self.record.finish is not None:
            return False
        if self._terms.resume_s is not None:
            # From the newest event on, not from where the reader was: it may have been repeating older ones.
            self.window.attach(Reader.NONE, self.record.output_tokens - self._pending)
            return False
        late = self.budget.remaining_s(now) <= 0
        return self.ask_end(Reason.DEADLINE_EXCEEDED if late else Reason.CLIENT_CANCELLED, now)

    def write(self, tokens: int, sequence: int) -> None:
        """An event was taken by the transport, or by the log where nobody reads. On the hot path."""
        self.writing_since = None
        self.window.write(tokens, sequence)
        self.record.sent_tokens = self.window.sent

    def grant(self) -> int | None:
        """A new credit limit for the running attempt; None: nothing to grant."""
        return self.window.grant() if self._is_running and self.record.finish is None else None

    # What comes next

    def next(self, now: float) -> Step:
        """What the reader is told next. On the hot path; `take` must follow unless it is WAIT, RETRY or OVER."""
        if self._is_told:
            return Step.OVER
        if self.record.finish is None:
            step = self._next_live(now)
            if step is not None:
                return step
        if self.sequence == 0:
            return Step.REFUSED
        asked = self.record.asked_at
        if self._is_running and (asked is None or now - asked < CONFIRM_S):
            return Step.WAIT
        lost_at = self._beside.lost_at if self._beside is not None else None
        if lost_at is not None and now - lost_at < CONFIRM_S:
            return Step.WAIT  # so that its usage is in the sum
        return Step.TERMINAL

    def _next_live(self, now: float) -> Step | None:
        """As `next` while no end is decided; None: it has just been."""
        if self._has_news:
            if self.record.known_tokens:
                return Step.CONTINUED
            return Step.RETRIED if self._was_accepted else Step.ACCEPTED
        end = self._end
        if (self._pending or self._has_text) and self._may_tell(end):
            return Step.DELTA
        if end is None:
            return Step.PAUSED if self._notice_due and self.writing_since is None else Step.WAIT
        if self._wants_retry(end, now):
            passed = self.budget.passed(now, admitted_at=self._began_at)
            if passed is None:
                return Step.RETRY if self.retry_at is None or now >= self.retry_at else Step.WAIT
            self.ask_end(passed, now)
            return None
        self._conclude(end)
        return None

    def _wants_retry(self, end: AttemptEnd, now: float) -> bool:
        """Whether there is to be another attempt; sets `retry_at`."""
        if self._early is not None:
            return False
        terms = self._terms
        goes_on = is_due(self.record, end, terms)
        if self._retries is None:
            return goes_on or (end.is_retryable and self.record.may_retry(terms.attempts_max))
        if self.retry_at is None:
            later = self._retries.next_at(self.record, self.current.replica, end, terms.attempts_max, now)
            if later is not None and later > now and self.budget.passed(later, admitted_at=self._began_at) is not None:
                later = None  # its time comes too late
            self.retry_at = now if goes_on else later
            if self.retry_at is not None and not end.is_free and not self._retries.budget.allows(now):
                self._retries.budget.refused += 1
                self.refused_retry, self.retry_at = "budget", None
        return self.retry_at is not None

    @property
    def _began_at(self) -> float | None:
        """When an engine began with it, where that lasts while it waits for another attempt: behind output."""
        return self.record.admitted_at if self.record.first_output_at is not None else None

    def _may_tell(self, end: AttemptEnd | None) -> bool:
        """With a reader, whatever waits; for the log alone, half a window at a time and no more than it may keep."""
        if self.detached_at is None or end is not None:
            return True
        return self._pending >= self.window.low and not self.log_is_full

    def _conclude(self, end: AttemptEnd) -> None:
        if self._early is not None and end.finish is Finish.CANCELLED:
            self.record.end(FINISH_OF[self._early], self._early)
        elif self._loss is not None and is_given_up(self.record, end):
            self.record.end(self._loss.finish, self._loss.reason)
        else:
            self.record.end(end.finish, end.reason)

    def tell_output(self, now: float) -> int:
        """`next` and `take` in one for what nearly every event is: output, to a reader, and nothing else to tell.

        Returns:
            The event's sequence; 0: it is not that simple. On the hot path.
        """
        if not self._pending or self._has_news or self.detached_at is not None or self.record.finish is not None:
            return 0
        self._pending = 0
        self.writing_since = now
        self.sequence += 1
        return self.sequence

    def take(self, step: Step, tokens: int | None = None) -> int:
        """`step` is being told; returns its event's sequence.

        Args:
            step: what `next` said.
            tokens: how many of those that wait a DELTA tells; None: all.
        """
        assert not self._is_told
        if step is Step.DELTA:
            self._pending -= self._pending if tokens is None else tokens
            self._has_text = False
        elif step in (Step.ACCEPTED, Step.RETRIED, Step.CONTINUED):
            self._has_news = False
            self._was_accepted = True
        elif step is Step.PAUSED:
            self._notice_due = None
        else:
            self._is_told = True
            if step is Step.REFUSED:
                return 0
        self.sequence += 1
        return self.sequence

    # Release

    @property
    def is_over(self) -> bool:
        """Whether the end is decided, and the engine has confirmed it or nothing ran."""
        return self.record.finish is not None and not self._is_running and self._beside is None

    def close(self) -> None:
        """Nobody reads it and nobody may come back: the last references go. Only once `is_over`."""
        self.holdings.release(Resource.SEND_BUFFER)
        self.holdings.release(Resource.TRACE)
