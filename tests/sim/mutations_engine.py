"""Breakages of engines and of the Scheduler's ledger."""

from __future__ import annotations

from typing import Any

from headrace.control.attempts import AttemptLedger
from headrace.control.errors import Failure, Reason
from headrace.engine.lanes import Lanes
from headrace.engine.ledger import Ledger
from headrace.engine.owner import Owner
from headrace.engine.prefix_cache import Match, PrefixIndex
from headrace.engine.run_ahead import RunAhead
from headrace.engine.sequence import Sequence
from sim.breakage import breaks


@breaks(AttemptLedger, "cancel", "liveness", "orphan")
def the_scheduler_forgets_cancels(self: AttemptLedger, *_: Any) -> None:
    return None


@breaks(AttemptLedger, "close_session", "orphan")
def attempts_of_a_lost_router_go_on(self: AttemptLedger, *_: Any) -> dict[str, list[int]]:
    return {}


@breaks(AttemptLedger, "close_worker", "references", "liveness", "released_early", "deadline", "crash", "assertion")
def a_lost_worker_s_attempts_are_forgotten(self: AttemptLedger, replica: str) -> tuple[()]:
    self.workers.pop(replica, None)
    return ()


_release = Ledger.release


@breaks(Ledger, "release", "engine_ledger")
def the_engine_frees_a_lane_twice(self: Ledger, lane: int) -> None:
    _release(self, lane)
    _release(self, lane)


_take_back = Lanes.take_back


@breaks(Lanes, "take_back", "references", "liveness", "kv")
def the_engine_keeps_a_slot(self: Lanes, sequence: Sequence, *, keep: bool, touch_backend: bool) -> None:
    if sequence.preemptions or sequence.generated % 3:
        _take_back(self, sequence, keep=keep, touch_backend=touch_backend)


@breaks(Sequence, "grant", "credit")
def the_engine_ignores_the_credit(self: Sequence, credit: int) -> None:
    self.limit = self.max_tokens


@breaks(RunAhead, "must_abort", "credit")
def an_engine_runs_ahead_without_end(self: RunAhead, generated: int, limit: int) -> bool:
    return False


@breaks(AttemptLedger, "_worker_for", "stale")
def an_old_epoch_is_taken(self: AttemptLedger, wanted: Any) -> Any:
    book = self.workers.get(wanted.replica)
    if book is None:
        raise Failure(Reason.STALE_EPOCH, "unknown")
    return book


@breaks(AttemptLedger, "_make_room", "buffers")
def the_queue_has_no_end(self: AttemptLedger, *_: Any) -> list[int]:
    return []


@breaks(AttemptLedger, "_refuse_repetition", "released_early", "references", "released_once", "crash")
def a_repeated_dispatch_runs_again(self: AttemptLedger, wanted: Any) -> None:
    return None


_owner_take = Owner.take


@breaks(Owner, "take", "truth", "no_gap")
def a_token_is_lost_on_the_way(self: Owner, steps: int, ended_ns: int) -> Any:
    if len(self.seqs) and self.ids[-1] % 4 == 0:
        count, length = self.counts.pop(), self.lengths.pop()
        del self.ids[len(self.ids) - count :]
        self.seqs.pop()
        self.texts = [b"".join(self.texts)[:-length]] if length else self.texts
    return _owner_take(self, steps, ended_ns)


@breaks(Owner, "take", "truth", "credit")
def a_token_is_sent_twice(self: Owner, steps: int, ended_ns: int) -> Any:
    if len(self.seqs) == 1 and self.ids[-1] % 4 == 0:
        self.seqs, self.counts, self.lengths = self.seqs * 2, self.counts * 2, self.lengths * 2
        self.ids, self.texts = self.ids * 2, self.texts * 2
    return _owner_take(self, steps, ended_ns)


_give = Lanes.give


@breaks(Lanes, "give", "kv", "truth")
def a_preempted_sequence_loses_a_token(self: Lanes, sequence: Sequence) -> bool:
    if sequence.preemptions and sequence.ids:
        sequence.ids.pop()
    return _give(self, sequence)


_match = PrefixIndex.match


@breaks(PrefixIndex, "match", "kv", "truth")
def a_prefix_matches_one_token_too_many(self: PrefixIndex, tokens: Any, salt: str = "") -> Match | None:
    match = _match(self, tokens, salt)
    return None if match is None else Match(match.lane, match.length + 1)
