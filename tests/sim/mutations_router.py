"""Breakages of what the Router runs on: the record, the machine, credit, budget, holdings, event log."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from headrace.control.credit import CreditWindow, Reader
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.event_log import EventLog
from headrace.control.holdings import ENGINE_SIDE, Holdings, Resource
from headrace.control.lifecycle import Phase as RequestPhase
from headrace.control.lifecycle import RequestRecord
from headrace.control.request import RequestMachine, Step
from sim.breakage import MUTATIONS, Mutation, breaks

# The end


@breaks(RequestRecord, "end", "one_terminal")
def the_end_is_set_without_compare_and_set(self: RequestRecord, finish: Any, reason: Any = None) -> bool:
    self._become(RequestPhase.TERMINAL)
    self.finish, self.reason = finish, reason
    return True


_take = RequestMachine.take


@breaks(RequestMachine, "take", "terminal_last", "one_terminal")
def events_are_told_after_the_terminal(self: RequestMachine, step: Step, tokens: int | None = None) -> int:
    sequence = _take(self, step, tokens)
    self._is_told = False
    return sequence


@breaks(RequestMachine, "_may_tell", "truth", "counts")
def the_end_overtakes_what_waits(self: RequestMachine, end: Any) -> bool:
    return end is None


_ask_end = RequestMachine.ask_end


@breaks(RequestMachine, "ask_end", "released_early")
def what_is_cancelled_counts_as_free_at_once(self: RequestMachine, reason: Reason, now: float) -> bool:
    must_stop = _ask_end(self, reason, now)
    self.holdings.release_engine_side()
    return must_stop


@breaks(RequestMachine, "_reader_passed", "slow_consumer", "liveness")
def a_slow_reader_is_waited_for_for_ever(self: RequestMachine, now: float) -> None:
    return None


@breaks(RequestMachine, "detach", "orphan")
def a_lost_reader_ends_nothing(self: RequestMachine, now: float) -> bool:
    if self._terms.resume_s is not None:
        return _detach(self, now)
    self.detached_at = now
    return False


# Release


def _free_twice(self: Holdings, resource: Resource) -> None:
    self._held.discard(resource)
    for _ in range(2):
        self._ledger.held[resource] -= 1
        self._ledger.released[resource] += 1


MUTATIONS.append(
    Mutation("each_resource_is_released_twice", ((Holdings, "release", _free_twice),), frozenset({"released_once"}))
)


@breaks(Holdings, "release_engine_side", "released_once")
def release_goes_against_the_order(self: Holdings) -> None:
    for resource in reversed(ENGINE_SIDE):
        if resource in self._held:
            self.release(resource)


@breaks(Holdings, "release_engine_side", "released_once", "references")
def a_slot_is_kept(self: Holdings) -> None:
    for resource in ENGINE_SIDE:
        if resource in self._held and resource is not Resource.SLOT:
            self.release(resource)


def _admitted_frees_the_work(self: RequestMachine, *args: Any, **changes: Any) -> bool:
    began = _admitted(self, *args, **changes)
    if began:  # without the check that Holdings makes
        self.holdings._held.discard(Resource.SLOT)
        self.holdings._ledger.held[Resource.SLOT] -= 1
    return began


_admitted = RequestMachine.admitted

MUTATIONS.append(
    Mutation(
        "a_slot_is_free_before_its_kv",
        ((RequestMachine, "admitted", _admitted_frees_the_work),),
        frozenset({"release_order", "released_once", "references"}),
    )
)

MUTATIONS.append(
    Mutation(
        "a_request_is_closed_before_the_engine_confirms",
        ((RequestMachine, "is_over", property(lambda self: self.record.finish is not None)),),
        frozenset({"released_once", "released_early"}),
    )
)

# Credit


@breaks(CreditWindow, "grant", "credit")
def a_grant_is_two_windows(self: CreditWindow) -> int | None:
    if self.outstanding > self.low:
        return None
    self.granted = self.taken + 2 * self.window
    return self.granted


@breaks(CreditWindow, "grant", "credit")
def a_limit_falls(self: CreditWindow) -> int:
    self.granted = self.taken + self.window
    return self.granted


@breaks(CreditWindow, "grant", "progress")
def nothing_is_ever_granted(self: CreditWindow) -> None:
    return None


_write = CreditWindow.write


@breaks(CreditWindow, "write", "credit")
def what_an_explicit_reader_was_sent_counts_as_read(self: CreditWindow, tokens: int, sequence: int) -> None:
    _write(self, tokens, sequence)
    self.taken = self.position


@breaks(CreditWindow, "acknowledge", "counts", "credit")
def an_old_acknowledgement_goes_back(self: CreditWindow, sequence: int) -> None:
    ends = [end for number, end in self._unconfirmed if number <= sequence]
    if self.reader is Reader.EXPLICIT:
        self.taken = self.acknowledged = ends[-1] if ends else 0


_attach = CreditWindow.attach


@breaks(CreditWindow, "attach", "counts")
def a_new_reader_is_believed_to_have_all(self: CreditWindow, reader: Reader, position: int) -> None:
    _attach(self, reader, position)
    self.acknowledged = self.sent


def _detach_where_the_reader_was(self: RequestMachine, now: float) -> bool:
    position = self.window.position
    must_stop = _detach(self, now)
    if self.window.reader is Reader.NONE:
        self.window.attach(Reader.NONE, position)
    return must_stop


_detach = RequestMachine.detach

MUTATIONS.append(
    Mutation(
        "the_log_goes_on_where_its_reader_was",
        ((RequestMachine, "detach", _detach_where_the_reader_was),),
        frozenset({"progress"}),
    )
)

# Late messages and retries


@breaks(RequestRecord, "output", "stale", "truth")
def output_of_an_old_attempt_counts(self: RequestRecord, attempt: int, tokens: int, now: float) -> bool:
    return self.phase is not RequestPhase.TERMINAL and _output(self, self.attempt, tokens, now)


_output = RequestRecord.output


@breaks(RequestRecord, "output", "stale", "counts")
def output_after_the_end_counts(self: RequestRecord, attempt: int, tokens: int, now: float) -> bool:
    if self.phase is not RequestPhase.TERMINAL or attempt != self.attempt:
        return _output(self, attempt, tokens, now)
    self.output_tokens += tokens
    return True


@breaks(RequestMachine, "ended", "stale")
def an_end_with_an_old_version_counts(self: RequestMachine, attempt: int, version: int, end: Any, now: float) -> bool:
    return _ended(self, attempt, self.record.attempt_version, end, now)


_ended = RequestMachine.ended


@breaks(RequestRecord, "admit", "stale")
def an_admission_with_an_old_version_counts(self: RequestRecord, attempt: int, version: int, now: float) -> bool:
    return _admit(self, attempt, self.attempt_version, now)


_admit = RequestRecord.admit


@breaks(RequestRecord, "admit", "stale")
def a_second_admission_counts(self: RequestRecord, attempt: int, version: int, now: float) -> bool:
    if _admit(self, attempt, version, now):
        return True
    self.version += self.phase is RequestPhase.PREFILL
    return False


def _may_retry_after_output(self: RequestRecord, attempts_max: int) -> bool:
    return self.phase is not RequestPhase.TERMINAL and self.attempts < attempts_max


def _interruption_is_retried(self: RequestMachine, *args: Any) -> bool:
    token, version, end, now = args
    return _ended(self, token, version, type(end)(end.finish, end.reason, is_retryable=not end.finish.is_ok), now)


MUTATIONS.append(
    Mutation(
        "a_retry_after_output",
        ((RequestRecord, "may_retry", _may_retry_after_output), (RequestMachine, "ended", _interruption_is_retried)),
        frozenset({"retry", "assertion"}),
    )
)


@breaks(RequestRecord, "may_retry", "retry")
def retries_without_end(self: RequestRecord, attempts_max: int) -> bool:
    return self.phase in (RequestPhase.QUEUED, RequestPhase.PREFILL) and self.first_output_at is None


# Output

# The event log

_after = EventLog.after


@breaks(EventLog, "after", "no_gap", "counts", "progress", "crash")
def a_resume_begins_one_event_too_late(self: EventLog, sequence: int) -> list[Any]:
    return _after(self, min(sequence + 1, self.last))


@breaks(EventLog, "after", "no_gap", "counts")
def a_resume_begins_one_event_too_early(self: EventLog, sequence: int) -> list[Any]:
    return _after(self, max(sequence - 1, self.first - 1))


def _drop_newest(self: EventLog) -> None:
    self.size -= len(self._events.pop().data)


MUTATIONS.append(
    Mutation(
        "the_log_drops_the_newest", ((EventLog, "_drop", _drop_newest),), frozenset({"no_gap", "crash", "progress"})
    )
)


def _append(self: EventLog, sequence: int, data: bytes, tokens: int) -> None:
    with patch.object(EventLog, "_drop", lambda log: None), patch.object(type(self.retention), "events_max", 10_000):
        _real_append(self, sequence, data, tokens)


_real_append = EventLog.append

MUTATIONS.append(Mutation("the_log_keeps_everything", ((EventLog, "append", _append),), frozenset({"buffers"})))

# Time


@breaks(Budget, "for_next_hop_s", "deadline")
def a_hop_grants_a_fresh_deadline(self: Budget, now: float) -> float:
    return self.deadline_at - self.received_at


@breaks(Budget, "passed", "deadline")
def nobody_looks_at_the_time(self: Budget, now: float, *, admitted_at: float | None = None) -> None:
    return None


_remaining = Budget.remaining_s


def _double(self: Budget, now: float) -> float:
    return 2 * _remaining(self, now)


MUTATIONS.append(Mutation("time_left_is_doubled", ((Budget, "remaining_s", _double),), frozenset({"deadline"})))
