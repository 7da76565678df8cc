"""The relay on its own: who is told what, and what is dropped and counted."""

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.engine.contract import StepBatch
from headrace.scheduler import relay as relay_module
from headrace.scheduler.engine_run import EngineRun
from support.relaying import REPLICA, REVISION, Bench
from support.scheduling import make_dispatch
from support.scripted_engine import admitted, finished


@pytest.fixture
def bench():
    return Bench()


async def test_what_an_old_run_of_an_engine_says_is_dropped_and_counted(bench):
    bench.relay.close_engine("replicas/a", drained=False)
    bench.open()
    bench.dispatch(5)
    bench.told()
    old = bench.run - 1
    bench.tell({"type": "alive", "stats": {}}, run=old)  # says nothing of anybody
    assert bench.metric("stale_incarnation_total") == 0
    bench.tell(admitted(5), run=old)
    bench.say(5, 3, run=old)
    bench.tell(finished(5, "stop"), run=old)
    bench.relay.on_refused(old, [5], {"reason": "OVERLOADED"})
    frame = bench.told()
    assert (len(frame.admitted), len(frame.deltas.attempts), len(frame.ended)) == (0, 0, 0)
    assert bench.metric("stale_incarnation_total") == 4
    assert bench.metric("tokens_dropped_total") == 3
    bench.tell(admitted(5))
    bench.say(5, 2)
    bench.tell(finished(5, "stop", emitted=2))
    frame = bench.told()
    assert (len(frame.admitted), list(frame.deltas.token_counts), len(frame.ended)) == (1, [2], 1)


async def test_each_run_of_an_engine_has_a_number_of_its_own(bench):
    runs = [EngineRun(None, "replicas/a", bench.relay) for _ in range(2)]
    assert runs[0].incarnation != runs[1].incarnation
    bench.dispatch(5)
    for run in runs:
        run._sink.on_batch(StepBatch(events=[admitted(5)]))
        run._sink.on_refused([5], {})
    assert bench.metric("stale_incarnation_total") == 4


async def test_the_record_version_is_echoed_whatever_the_end(bench):
    for token, version in ((1, 11), (2, 12), (3, 13), (4, 14)):
        bench.dispatch(token, record_version=version)
    bench.dispatch(6, record_version=16, epoch=1)
    bench.tell(admitted(1), admitted(4))
    bench.tell(finished(1, "stop"), {"type": "refused", "seq": 2, "error": {"reason": "CONTEXT_LENGTH_EXCEEDED"}})
    bench.relay.on_refused(bench.run, [3], {"reason": "DEADLINE_EXCEEDED"})
    bench.relay.close_engine("replicas/a", drained=False)
    frame = bench.told()
    assert {a.attempt: a.record_version for a in frame.admitted} == {1: 11, 4: 14}
    assert {e.attempt: e.record_version for e in frame.ended} == {1: 11, 2: 12, 3: 13, 4: 14, 6: 16}


async def test_output_tokens_are_what_the_engine_handed_out_and_unset_where_nobody_knows(bench):
    for token in (1, 2, 3):
        bench.dispatch(token)
        bench.tell(admitted(token))
    bench.say(1, 2)
    bench.tell(finished(1, "length", emitted=2))
    bench.say(2, 2)
    bench.relay.close_engine("replicas/a", drained=False)
    bench.dispatch(4)
    ended = {e.attempt: e for e in bench.told().ended}
    assert {token: e.output_tokens for token, e in ended.items() if e.HasField("output_tokens")} == {1: 2, 3: 0, 4: 0}
    assert not ended[2].HasField("output_tokens")


async def test_an_old_epoch_is_refused_and_counted(bench):
    bench.dispatch(1, epoch=6)
    assert bench.engine.asked == []
    assert bench.metric("attempts_ended_total", finish_reason="REJECTED", reason="STALE_EPOCH") == 1


@pytest.mark.parametrize(
    ("limits", "finish", "reason"),
    [
        ({"remaining_s": 0}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ({"queue_s": 0}, "REJECTED", "QUEUE_TIMEOUT"),
        ({"remaining_s": 0, "queue_s": 0}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    ],
    ids=["the deadline", "the wait", "both"],
)
async def test_a_dispatch_whose_time_is_gone_ends_for_that(bench, limits, finish, reason):
    bench.dispatch(1, **limits)
    (ended,) = bench.told().ended
    assert ended.reason == inference_pb2.FinishReason.Value(f"FINISH_REASON_{finish}")
    assert ended.error.reason == errors_pb2.Reason.Value(f"REASON_{reason}")
    assert ended.error.metadata["stage"] == "queue"
    assert bench.engine.asked == []
    assert bench.metric("attempts_ended_total", finish_reason=finish, reason=reason) == 1


@pytest.mark.parametrize(
    ("cause", "operation", "finish", "reason"),
    [
        ("CANCELLED", "cancelled", "CANCELLED", "CLIENT_CANCELLED"),
        ("DEADLINE_EXCEEDED", "deadline", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("SLOW_CONSUMER", "cancelled", "SLOW_CONSUMER", "SLOW_CONSUMER"),
        ("REJECTED", "cancelled", "REJECTED", "QUEUE_TIMEOUT"),
        ("DRAINED", "cancelled", "CANCELLED", "CLIENT_CANCELLED"),
        ("UNSPECIFIED", "cancelled", "CANCELLED", "CLIENT_CANCELLED"),
    ],
)
async def test_a_cancel_ends_for_its_first_cause_and_each_has_a_label_of_its_own(
    bench, cause, operation, finish, reason
):
    bench.dispatch(1)
    number = inference_pb2.FinishReason.Value(f"FINISH_REASON_{cause}")
    bench.take(cancels=[pb.Cancel(attempt=1, cause=number)])
    bench.take(cancels=[pb.Cancel(attempt=1, cause=inference_pb2.FINISH_REASON_CANCELLED)])
    assert bench.engine.asked[1:] == [("cancel", (1,), operation)]
    bench.tell(finished(1, operation))
    (ended,) = bench.told().ended
    assert ended.reason == inference_pb2.FinishReason.Value(f"FINISH_REASON_{finish}")
    assert bench.metric("attempts_ended_total", finish_reason=finish, reason=reason) == 1
    assert bench.metric("cancels_repeated_total") == 1
    assert bench.metric("cancels_total") == bench.metric("cancels_confirmed_total") == 1
    assert bench.metric("cancel_to_confirmed_seconds_count") == 1
    assert bench.metric("cancel_to_confirmed_seconds_bucket", le="10.0") == 1


async def test_credits_that_raise_nothing_or_come_too_late_do_not_reach_the_engine(bench):
    bench.dispatch(1, credit=8)
    for limit in (8, 16, 12, 2**40, 2**50):
        bench.take(credits=[pb.Credit(attempt=1, limit=limit)])
    bench.take(cancels=[pb.Cancel(attempt=1)])
    bench.take(credits=[pb.Credit(attempt=1, limit=100)])
    sent = [asked[2] for asked in bench.engine.asked if asked[0] == "credit"]
    assert sent == [16, 2**31 - 1]
    assert bench.metric("stale_credits_total") == 3


async def test_loads_follow_preemption(bench):
    def load():
        (replica,) = bench.relay.load_report().replicas
        return replica.active, replica.waiting, replica.kv_cells_reserved

    bench.dispatch(1, max_tokens=20)
    bench.tell(admitted(1))
    assert load() == (1, 0, 25)
    bench.tell({"type": "preempted", "seq": 1, "preemptions": 1})
    assert load() == (0, 1, 0)
    assert bench.metric("attempts_preempted", revision=REVISION) == 1
    bench.tell({"type": "resumed", "seq": 1, "preemptions": 1, "cached_tokens": 3})
    assert load() == (1, 0, 25)
    bench.tell(  # merged: both of one more preemption, in the order that the engine had them
        {"type": "preempted", "seq": 1, "preemptions": 2}, {"type": "resumed", "seq": 1, "preemptions": 2}
    )
    assert load() == (1, 0, 25)
    bench.tell({"type": "preempted", "seq": 1, "preemptions": 3}, finished(1, "cancelled"))
    bench.tell({"type": "preempted", "seq": 1, "preemptions": 4}, {"type": "resumed", "seq": 9, "preemptions": 1})
    assert load() == (0, 0, 0)
    assert (bench.metric("preemptions_total"), bench.metric("late_messages_total")) == (3, 2)


async def test_an_attempt_that_outlived_a_limit_is_ended_for_that_limit(bench):
    bench.dispatch(1, queue_s=3)
    bench.dispatch(2, execution_s=3)
    bench.tell(admitted(2))
    now = bench.relay.ledger.attempts[1].received_at
    bench.relay.tick(now + 3 + relay_module.OVERDUE_S / 2)
    assert len(bench.engine.asked) == 2
    bench.relay.tick(now + 4 + relay_module.OVERDUE_S)
    assert sorted(bench.engine.asked[2:]) == [("cancel", (1,), "cancelled"), ("cancel", (2,), "cancelled")]
    bench.tell(finished(1, "cancelled"), finished(2, "cancelled"))
    reasons = {e.attempt: errors_pb2.Reason.Name(e.error.reason) for e in bench.told().ended}
    assert reasons == {1: "REASON_QUEUE_TIMEOUT", 2: "REASON_EXECUTION_TIMEOUT"}


async def test_an_engine_that_does_not_confirm_is_condemned_after_two_looks(bench):
    bench.dispatch(1)
    bench.take(cancels=[pb.Cancel(attempt=1)])
    asked_at = bench.relay.ledger.attempts[1].cancel_asked_at
    late = asked_at + relay_module.CANCEL_CONFIRM_S
    for now in (late - 2, late - 1, late + 0.1):
        bench.relay.tick(now)
    assert bench.metric("engines_hung_total") == 0
    bench.relay.tick(late + 1.1)
    assert bench.engine.asked[-1] == ("condemn", "the engine did not confirm a cancel within 10 s")
    assert bench.metric("engines_hung_total") == 1


async def test_what_engine_and_books_do_not_share_is_ended_after_two_looks(bench):
    bench.dispatch(1)
    bench.dispatch(2)
    bench.dispatch(3)
    bench.tell(admitted(1), admitted(2))
    bench.say(2, 7)
    bench.told()
    now, asked = bench.relay.ledger.attempts[1].received_at, len(bench.engine.asked)
    for n in (1, 2):
        bench.relay.tick(now + 20 * n)
        assert bench.engine.lists == n
        bench.tell({"type": "sequences", "seqs": [1, 9]})
        ended = {e.attempt: inference_pb2.FinishReason.Name(e.reason) for e in bench.told().ended}
        assert ended == ({} if n == 1 else {2: "FINISH_REASON_INTERRUPTED", 3: "FINISH_REASON_FAILED"})
    assert bench.engine.asked[asked:] == [("cancel", (9,), "cancelled")]
    assert set(bench.relay.ledger.attempts) == {1}
    assert (bench.metric("orphans_cancelled_total"), bench.metric("attempts_unknown_total")) == (1, 2)


async def test_an_engine_that_does_not_answer_a_look_loses_nothing(bench):
    bench.dispatch(1)
    now = bench.relay.ledger.attempts[1].received_at
    for n in range(1, 5):
        bench.relay.tick(now + 20 * n)
    assert bench.engine.lists == 1
    assert set(bench.relay.ledger.attempts) == {1}


async def test_what_a_drain_cuts_off_is_left_so_that_another_engine_can_go_on(bench):
    message = make_dispatch(REPLICA, attempt=1)
    message.continuation.token_ids[:] = [7, 8]
    message.continuation.text_bytes, message.tenant = 3, "tenants/t"
    bench.take(dispatches=[message])
    assert bench.engine.requests[1]["continuation"] == {"tokens": 2, "text_bytes": 3}
    assert bench.engine.requests[1]["cache_salt"] == "tenants/t"
    bench.tell(admitted(1))
    bench.relay.cut_engine("replicas/a")
    assert bench.engine.asked[-1] == ("cancel", (1,), "drained")
    bench.tell(finished(1, "cancelled"))
    (ended,) = bench.told().ended
    assert ended.reason == inference_pb2.FINISH_REASON_DRAINED
