"""The attempts of one request: which one counts, what the others still hold, and what became of each.

What arrives for an attempt is taken here; what follows for the reader is headrace.control.request, which builds on it.
Sans-io.
"""

from __future__ import annotations

from headrace.control.attempt_log import AttemptCause, Attempted
from headrace.control.continuation import LOSSES
from headrace.control.credit import CreditWindow
from headrace.control.errors import Reason
from headrace.control.hedge import Beside
from headrace.control.holdings import Holdings, Resource, ResourceLedger
from headrace.control.lifecycle import Finish, RequestRecord
from headrace.control.steps import AttemptEnd

_NONE = Attempted(0, 0, "", AttemptCause.FIRST)
"""Stands for the attempt that counts before there is one; nothing arrives for it."""


class RequestAttempts:
    """See the module. Invariant: one attempt counts, and at most one more runs beside it (headrace.control.hedge)."""

    def __init__(self, record: RequestRecord, window: CreditWindow, ledger: ResourceLedger) -> None:
        self.record = record
        self.window = window
        self.holdings = Holdings(ledger)
        self.attempted: list[Attempted] = []
        """All attempts, in order."""
        self.unstopped = 0
        """Token of a loser that its engine has to be told to stop; the shell sets it back to 0."""
        self.retry_at: float | None = None
        """When the next attempt may start, while that is what the request waits for."""
        self.late = 0
        """Messages that no longer counted."""
        self._ledger = ledger
        self._is_running = False
        self._current = _NONE
        self._beside: Beside | None = None
        self._end: AttemptEnd | None = None
        """How the attempt that counts ended."""
        self._has_news = False
        """Whether the engine has begun with it, and nobody was told."""
        self._pending = 0
        self._has_text = False
        """Whether text waits that has no token of its own: what a lost engine had held back of one that is known."""
        self._loss: AttemptEnd | None = None
        """How the attempt ended that the current one continues."""
        self._early: Reason | None = None
        """Why the request is to end once the engine has stopped."""

    @property
    def is_running(self) -> bool:
        """Whether an attempt may still hold something in an engine."""
        return self._is_running or self._beside is not None

    @property
    def current(self) -> Attempted:
        """The attempt that counts, or the last one that did. Only once there was one."""
        assert self.attempted
        return self._current

    @property
    def is_charged(self) -> bool:
        """Whether an attempt that starts now, behind another one, costs the fleet's budget."""
        return self._end is None or not self._end.is_free

    @property
    def may_hedge(self) -> bool:
        """Whether a rival may start now: one runs, nothing of it has arrived, and there was none before."""
        return (
            self._is_running
            and self.record.first_output_at is None
            and self.record.finish is None
            and self._early is None
            and all(one.cause is not AttemptCause.HEDGE for one in self.attempted)
        )

    def runs(self, attempt: int) -> bool:
        """Whether an attempt may still hold something in its engine."""
        beside = self._beside
        return (self._is_running and attempt == self.record.attempt) or (beside is not None and attempt == beside.token)

    def dispatch(self, attempt: int, replica: str, cause: AttemptCause | None = None, now: float = 0.0) -> int:
        """An attempt starts; returns the credit it starts with. By default the first one, or else a retry.

        Behind output it is a continuation: it begins with all that arrived, and its credit counts from the first token.
        """
        assert not self._is_running, "the attempt before was not confirmed"
        goes_on = self.record.first_output_at is not None
        if goes_on:
            assert self._end is not None, "continued what is not lost"
            started, cause = self.record.go_on(attempt, replica), AttemptCause.CONTINUATION
            self._loss = self._end if self._end.finish in LOSSES else self._loss
        else:
            started = self.record.dispatch(attempt, replica)
            cause = cause or (AttemptCause.RETRY if self.attempted else AttemptCause.FIRST)
        assert started, "dispatched a request that is over"
        self._current = self._log(attempt, replica, cause)
        self.holdings.hold(Resource.ENGINE_WORK)
        self._is_running = True
        self._end = None
        self._has_news = False
        self.retry_at = None
        return self.window.reopen(now) if goes_on else self.window.open()

    def hedge(self, attempt: int, replica: str) -> int:
        """A rival starts; returns the credit it starts with. Only while `may_hedge`."""
        assert self.may_hedge
        holdings = Holdings(self._ledger)
        holdings.hold(Resource.ENGINE_WORK)
        version = self.record.beside(replica)
        self._beside = Beside(self._log(attempt, replica, AttemptCause.HEDGE), version, holdings)
        return self.window.granted

    def _log(self, attempt: int, replica: str, cause: AttemptCause) -> Attempted:
        self.attempted.append(Attempted(attempt, len(self.attempted) + 1, replica, cause))
        return self.attempted[-1]

    def version_of(self, attempt: int) -> int:
        """The record's version that fences an attempt which runs."""
        beside = self._beside
        return beside.version if beside is not None and attempt == beside.token else self.record.attempt_version

    def admitted(self, attempt: int, version: int, now: float, *, cached_tokens: int = 0) -> bool:
        """The engine has begun with an attempt; False: late, dropped."""
        beside = self._beside
        if beside is not None and (attempt, version) == (beside.token, beside.version) and beside.admitted_at is None:
            beside.admitted_at = now
            _hold_slot(beside.holdings, cached_tokens)
            return True
        if not self._is_running or not self.record.admit(attempt, version, now):
            self.late += 1
            return False
        _hold_slot(self.holdings, cached_tokens)
        self._has_news = True
        return True

    def output(self, attempt: int, tokens: int, now: float) -> bool:
        """Output arrived; False: late, dropped. On the hot path."""
        if self._beside is not None:
            self._first_output(attempt, now)
        if not self._is_running or not self.record.output(attempt, tokens, now):
            self.late += 1
            return False
        self._pending += tokens
        if not tokens:
            self._has_text = True
        self._current.output_tokens += tokens
        self.window.output(tokens, now)
        return True

    def ended(self, attempt: int, version: int, end: AttemptEnd, now: float) -> bool:
        """The attempt is over and holds nothing any more; False: late, dropped.

        If the engine handed out another number of tokens than arrived, a hop has lost or repeated some.
        """
        record, beside = self.record, self._beside
        if beside is not None and (attempt, version) == (beside.token, beside.version):
            if not (beside.is_rival and end.finish.is_ok and self._is_open):
                return self._beside_ended(beside, end, now)
            self._promote(beside, now)  # a whole answer without a token has won too
        if not self._is_running or (attempt, version) != (record.attempt, record.attempt_version):
            self.late += 1
            return False
        self._is_running = False
        if end.output_tokens is not None and end.output_tokens != record.output_tokens - record.known_tokens:
            end = AttemptEnd(Finish.FAILED, Reason.SEQUENCE_GAP, release_s=end.release_s)
        self._end = end
        self._settle(self.current, end)
        self.holdings.release_engine_side()
        self.window.paused_at = None  # the engine waits for nobody any more
        record.freed_at = now
        record.stopped_at = now - end.release_s if end.release_s is not None else None
        beside = self._beside
        if beside is not None and beside.is_rival and self._is_open:
            if end.is_retryable or end.is_for_load:
                self._promote(beside, now)
            else:
                self._lose(beside, now)
        return True

    def _settle(self, attempted: Attempted, end: AttemptEnd) -> None:
        """Keep how an attempt ended."""
        attempted.finish, attempted.reason = end.finish, end.reason
        self.record.attempts_free += end.is_free
        self.record.overloads += end.is_for_load

    # The attempt beside it

    @property
    def _is_open(self) -> bool:
        """Whether no end is decided or asked for."""
        return self.record.finish is None and self._early is None

    def _first_output(self, attempt: int, now: float) -> None:
        """The first of two to answer wins; whose output it is does not matter to one that has lost."""
        beside = self._beside
        if beside is None or not beside.is_rival or not self._is_open:
            return
        if attempt == beside.token:
            self._promote(beside, now)
        elif attempt == self.record.attempt and self._is_running:
            self._lose(beside, now)

    def _promote(self, beside: Beside, now: float) -> None:
        """The rival counts from now on, and the one that did has lost, unless it is over."""
        former, version, admitted_at = self.current, self.record.attempt_version, self.record.admitted_at
        self._current = beside.attempted
        self.record.switch(beside.token, beside.version, beside.admitted_at)
        self.holdings.trade_engine_side(beside.holdings)
        self._has_news = beside.admitted_at is not None
        self._beside = None
        if self._is_running:
            self._beside = Beside(former, version, beside.holdings, admitted_at)
            self._lose(self._beside, now)
        self._is_running = True
        self._end = None

    def _lose(self, beside: Beside, now: float) -> None:
        beside.lost_at = now
        self.unstopped = beside.token

    def _beside_ended(self, beside: Beside, end: AttemptEnd, now: float) -> bool:
        beside.holdings.release_engine_side()
        self._settle(beside.attempted, end if beside.is_rival else AttemptEnd(Finish.CANCELLED))
        self._beside = None
        return True


def _hold_slot(holdings: Holdings, cached_tokens: int) -> None:
    """What an admitted attempt holds."""
    holdings.hold(Resource.KV, Resource.SLOT)
    if cached_tokens:
        holdings.hold(Resource.PREFIX)
