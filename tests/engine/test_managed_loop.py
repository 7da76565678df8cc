"""The host of an engine that schedules by itself, turned by hand: what is told, when slots are free, who leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.harness import ListSink, prepared
from headrace.engine.backend import ModelFacts
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.managed_loop import Abort, ManagedLoop
from headrace.engine.operations import Cancel, Grant, OpenStream, Operation, Submit
from headrace.engine.request import RefusalError, Rejected, Sampling, invalid
from headrace.engine.sequence import Prepared
from headrace.engine.synthetic import END_TOKEN, SyntheticBackend

MODEL = SyntheticBackend()


@dataclass
class Scripted:
    """An engine that says what the test wants it to."""

    submitted: list[ManagedRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    waiting: list[Delta] = field(default_factory=list)
    is_dead: bool = False
    told: ManagedStats = field(default_factory=ManagedStats)

    facts: ModelFacts = MODEL.facts

    def start(self, wake: Any) -> None: ...

    def tokenize(self, text: str) -> list[int]:
        return MODEL.tokenize(text)

    def piece(self, token: int) -> bytes:
        return MODEL.piece(token)

    def check(self, sampling: Sampling, top_logprobs: int | None) -> None: ...

    def submit(self, request: ManagedRequest) -> None:
        self.submitted.append(request)

    def events(self) -> list[Delta]:
        deltas, self.waiting = self.waiting, []
        return deltas

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> ManagedStats:
        return self.told

    def health(self) -> str | None:
        return "gone" if self.is_dead else None

    def shutdown(self) -> None: ...


class Hand:
    """The loop over a `Scripted` engine."""

    def __init__(self, *, abort: Abort = Abort.ON, slots: int = 2, run_ahead: int = 4, cells: int = 4096) -> None:
        self.engine = Scripted()
        self.now_ns = 1_000_000_000
        self.loop = ManagedLoop(
            self.engine,
            abort=abort,
            identity={},
            incarnation="test",
            slots=slots,
            kv_cells=cells,
            lanes=slots,
            max_waiting=8,
            prefill_chunk=64,
            preempt_after_ns=0,
            run_ahead_tokens=run_ahead,
            clock=lambda: self.now_ns,
        )
        self.sink = ListSink()
        self.turn(OpenStream(self.sink))

    def turn(self, *operations: Operation) -> None:
        self.loop.turn(list(operations))

    def submit(self, *entries: Prepared | Rejected) -> None:
        self.turn(Submit(entries))

    def say(self, *tokens: int, stay: int = -1, **more: Any) -> None:
        """The engine generated these, for its newest request unless `stay` says which."""
        self.engine.waiting.append(Delta(self.engine.submitted[stay].id, tokens, **more))
        self.turn()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event) for batch in self.sink.batches for event in batch.events if event["type"] == kind]

    def ids(self, seq: int = 1) -> list[int]:
        found: list[int] = []
        for batch in self.sink.batches:
            at = 0
            for owner, count in zip(batch.seqs, batch.token_counts, strict=True):
                found += batch.token_ids[at : at + count] if owner == seq else []
                at += count
        return found

    def text(self) -> str:
        return b"".join(batch.text for batch in self.sink.batches).decode()

    @property
    def active(self) -> int:
        return int(self.loop.stats()["active"])


def words(text: str) -> list[int]:
    return MODEL.tokenize(text)


def test_tokens_go_out_as_they_come_and_the_end_frees_the_slot() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the water", max_tokens=3))
    (request,) = hand.engine.submitted
    assert (list(request.prompt), request.said, request.max_tokens) == (words(" the water"), 0, 3)
    assert request.end_tokens == {END_TOKEN}
    one, two, three = words(" is on hot")
    hand.say(one, cached=1)
    assert (hand.ids(), hand.active) == ([one], 1)
    hand.say(two, three, end=End.LENGTH, proposed=5)
    (finished,) = hand.events("finished")
    assert (hand.ids(), hand.text(), hand.active) == ([one, two, three], " is on hot", 0)
    assert finished["reason"] == "length"
    assert finished["usage"] == {
        "prompt": 2, "cached": 1, "generated": 3, "emitted": 3, "proposed": 5, "reasoning": 0,
    }  # fmt: skip
    assert not hand.engine.cancelled
    assert hand.loop.stats()["kv_reserved"] == 0


@pytest.mark.parametrize("ids", [[END_TOKEN], []])
def test_the_models_end_is_counted_and_not_told_whether_the_engine_shows_it_or_trims_it(ids: list[int]) -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the"))
    (one,) = words(" water")
    hand.say(one)
    hand.say(*ids, end=End.STOP, end_token=None if ids else END_TOKEN)
    (finished,) = hand.events("finished")
    assert finished["stop"] == {"kind": "eos", "value": END_TOKEN}
    assert (finished["usage"]["generated"], finished["usage"]["emitted"], hand.ids()) == (2, 1, [one])


def test_a_stop_string_is_found_by_the_host_over_token_borders_and_the_engine_is_asked_to_end() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the", stop=(" on hot",)))
    one, two, three = words(" is on hot")
    hand.say(one)
    hand.say(two)
    assert hand.ids() == [one]  # " on" may begin the stop string
    hand.say(three)
    assert hand.engine.cancelled == [hand.engine.submitted[0].id]
    assert (hand.events("finished"), hand.active) == ([], 1)  # the slot is not free before the engine says so
    hand.say(one)  # what it had under way
    hand.say(end=End.ABORTED)
    (finished,) = hand.events("finished")
    assert finished["stop"] == {"kind": "string", "value": " on hot"}
    assert (hand.ids(), hand.text(), hand.active, finished["usage"]["generated"]) == ([one], " is", 0, 3)


def test_a_cancel_is_confirmed_when_the_engine_has_let_go_and_a_late_end_of_another_kind_changes_nothing() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the", max_tokens=2))
    one, two = words(" is on")
    hand.say(one)
    hand.turn(Cancel((1,), "cancelled"))
    hand.turn(Cancel((1,), "deadline"))
    assert (len(hand.engine.cancelled), hand.events("finished")) == (1, [])
    hand.say(two, end=End.LENGTH)
    (finished,) = hand.events("finished")
    assert (finished["reason"], hand.ids(), hand.active) == ("cancelled", [one], 0)
    assert finished["timing_ns"]["stopped"] <= finished["timing_ns"]["finished"]


@pytest.mark.parametrize(("abort", "at_once", "after_first"), [
    (Abort.ON, 1, 1), (Abort.AFTER_FIRST_TOKEN, 0, 1), (Abort.OFF, 0, 0),
])  # fmt: skip
def test_when_the_engine_is_asked_to_end_a_request_is_a_setting(abort: Abort, at_once: int, after_first: int) -> None:
    hand = Hand(abort=abort)
    hand.submit(prepared(MODEL, 1, " the"))
    hand.turn(Cancel((1,), "cancelled"))
    assert len(hand.engine.cancelled) == at_once
    hand.say(*words(" is"))
    assert (len(hand.engine.cancelled), hand.active, hand.ids()) == (after_first, 1, [])
    hand.say(end=End.LENGTH if abort is Abort.OFF else End.ABORTED)
    assert hand.events("finished")[0]["reason"] == "cancelled"


def test_run_ahead_is_bounded_and_the_answer_goes_on_where_it_was() -> None:
    hand = Hand(run_ahead=4)
    hand.submit(prepared(MODEL, 1, " the", max_tokens=12, credit=2, sampling=Sampling(1.0, seed=7)))
    said = words(" is on hot and in to as by we")
    for token in said[:6]:
        hand.say(token)
    assert (hand.ids(), len(hand.engine.cancelled), hand.loop.stats()["buffered_tokens"]) == (said[:2], 1, 4)
    hand.say(said[6])  # under way when it was asked; it counts
    assert (hand.events("preempted"), hand.active) == ([], 1)
    hand.say(end=End.ABORTED)
    assert (len(hand.events("preempted")), hand.active, len(hand.engine.submitted)) == (1, 0, 1)
    hand.turn(Grant(((1, 4),)))  # three ahead: still more than half
    assert (hand.ids(), len(hand.engine.submitted)) == (said[:4], 1)
    hand.turn(Grant(((1, 5),)))
    first, second = hand.engine.submitted
    assert (list(second.prompt), second.said) == (words(" the") + said[:7], 7)
    assert second.max_tokens == 5
    assert second.sampling.seed != first.sampling.seed  # other random numbers of the same seed
    hand.turn(Grant(((1, -1),)))
    hand.say(*said[7:], end=End.LENGTH)
    assert (hand.ids(), len(hand.events("resumed")), hand.events("finished")[0]["reason"]) == (said, 1, "length")
    assert first.id != second.id


def test_credit_that_comes_while_it_leaves_brings_it_back_at_once() -> None:
    hand = Hand(run_ahead=2)
    prompt = words(" the and of in to it is on" * 3)  # long enough for a prefix, which only the engine may keep
    hand.submit(prepared(MODEL, 1, prompt, max_tokens=9, credit=1))
    said = words(" is on hot")
    for token in said:
        hand.say(token)
    hand.turn(Grant(((1, -1),)))
    assert (hand.ids(), len(hand.engine.submitted)) == (said, 1)
    hand.say(end=End.ABORTED)
    hand.turn()
    assert [list(one.prompt) for one in hand.engine.submitted] == [prompt, prompt + said]
    assert hand.events("resumed")[0]["cached_tokens"] == 0


def test_what_an_engine_says_behind_a_stop_is_nobody_s() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the"))
    one, two = words(" is on")
    hand.say(one, END_TOKEN, two)
    hand.say(end=End.ABORTED)
    (finished,) = hand.events("finished")
    assert (hand.ids(), finished["usage"]["generated"], finished["stop"]["kind"]) == ([one], 2, "eos")


def test_who_waits_for_credit_with_everything_generated_holds_no_slot() -> None:
    hand = Hand(run_ahead=8)
    hand.submit(prepared(MODEL, 1, " the", max_tokens=3, credit=1))
    said = words(" is on hot")
    hand.say(*said, end=End.LENGTH)
    assert (hand.ids(), hand.active, hand.events("finished")) == (said[:1], 0, [])
    hand.turn(Grant(((1, 3),)))
    assert (hand.ids(), len(hand.events("finished"))) == (said, 1)


def test_an_answer_with_presence_or_frequency_penalties_is_never_sent_out_and_in_again() -> None:
    hand = Hand(run_ahead=2)
    hand.submit(prepared(MODEL, 1, " the", credit=1, sampling=Sampling(1.0, presence_penalty=1.0, seed=1)))
    for token in words(" is on hot and in"):
        hand.say(token)
    assert hand.engine.cancelled == []


def test_slots_and_cells_bound_what_the_engine_is_given() -> None:
    hand = Hand(slots=2, cells=40)
    hand.submit(*[prepared(MODEL, seq, " the", max_tokens=15) for seq in (1, 2, 3)])
    assert (len(hand.engine.submitted), hand.loop.stats()["waiting"]) == (2, 1)
    hand.say(*words(" is"), stay=0, end=End.LENGTH)
    assert hand.loop.wait_s() == 0
    hand.turn()
    assert [len(hand.engine.submitted), hand.loop.stats()["waiting"]] == [3, 0]


def test_a_passed_deadline_ends_one_in_the_engine_once() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the", deadline_ns=hand.now_ns + 10))
    hand.say(*words(" is"))
    hand.now_ns += 20
    hand.turn()
    assert len(hand.engine.cancelled) == 1
    assert hand.loop.wait_s() > 0  # it is not looked at again and again while it leaves
    hand.say(end=End.ABORTED)
    assert hand.events("finished")[0]["reason"] == "deadline"


@pytest.mark.parametrize("end", [End.FAILED, End.ABORTED])
def test_an_end_that_nobody_asked_for_is_an_error_of_that_request_alone(end: End) -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the"), prepared(MODEL, 2, " the"))
    hand.say(*words(" is"), stay=0)
    hand.say(stay=0, end=end)
    (finished,) = hand.events("finished")
    assert (finished["seq"], finished["reason"], finished["error"]["reason"]) == (1, "error", "ENGINE_FAILED")
    assert hand.active == 1


def test_a_dead_engine_is_told_to_every_sequence() -> None:
    hand = Hand(slots=1)
    hand.submit(prepared(MODEL, 1, " the"), prepared(MODEL, 2, " the"))
    hand.engine.is_dead = True
    with pytest.raises(EngineDead):
        hand.turn()
    hand.loop.fail("id")
    assert {(one["seq"], one["reason"]) for one in hand.events("finished")} == {(1, "error"), (2, "error")}


def test_a_lost_owner_s_sequences_leave_the_engine_and_a_new_owner_hears_nothing_of_them() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the"))
    hand.sink.is_lost = True
    hand.turn()
    assert len(hand.engine.cancelled) == 1
    hand.say(end=End.ABORTED)
    assert hand.active == 0


def test_closing_ends_what_the_engine_still_has() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the"))
    hand.loop.close()
    assert hand.events("finished")[0]["reason"] == "cancelled"
    assert hand.sink.is_closed


def test_kv_that_is_used_and_not_reserved_is_cached() -> None:
    hand = Hand()
    hand.submit(prepared(MODEL, 1, " the", max_tokens=15))
    hand.engine.told = ManagedStats(kv_tokens=4096, kv_used_tokens=100)
    assert hand.loop.stats()["kv_cached"] == 100 - 16


def test_refusals_are_told_as_everywhere() -> None:
    hand = Hand()
    hand.submit(Rejected(3, invalid("stop", "is wrong")))
    assert hand.events("refused")[0]["error"]["field"] == "stop"
    assert isinstance(invalid("stop", "is wrong"), RefusalError)
