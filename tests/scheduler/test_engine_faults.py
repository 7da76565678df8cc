"""A whole Scheduler with an engine that says what the test wants: what no real engine would do on demand."""

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.resources import ReplicaState
from headrace.scheduler import main, relay
from support.scheduling import RawRouter, cluster
from support.scripted_engine import REVISION, admitted, finished, scripted_engine

pytestmark = pytest.mark.stack


class Named:
    """What `Cluster.replica` needs to know of a revision that is not in any snapshot."""

    name = REVISION


async def test_an_engine_that_swallows_a_cancel_is_given_up_and_the_attempts_end_truthfully(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "TICK_S", 0.1)
    monkeypatch.setattr(relay, "CANCEL_CONFIRM_S", 0.5)
    async with scripted_engine() as engine, cluster(tmp_path, attach=(engine.target,), engines=()) as running:
        engine.swallow = frozenset({"cancel"})
        first = await running.replica(Named, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            cancelled = await router.dispatch(first)
            other = await router.dispatch(first)
            await engine.until(lambda: sum(len(g["requests"]) for g in engine.asked("generate")) == 2)
            await engine.tell(admitted(cancelled), admitted(other))
            await engine.say(other, 1, 2)
            await router.until(lambda: router.heard[other].tokens)
            await router.send(cancels=[pb.Cancel(attempt=cancelled, cause=inference_pb2.FINISH_REASON_SLOW_CONSUMER)])
            await engine.until(lambda: engine.asked("cancel"))
            assert not router.heard[cancelled].ended
            ended = await router.end_of(cancelled, 10)
            assert ended.reason == inference_pb2.FINISH_REASON_SLOW_CONSUMER
            assert (await router.end_of(other, 5)).reason == inference_pb2.FINISH_REASON_INTERRUPTED
            second = await running.replica(Named, ReplicaState.READY, other_than=first.epoch)
            assert engine.streams == 2  # the first one was closed: whatever still ran there was its owner's
            assert "did not confirm a cancel" not in second.detail
            again = await router.dispatch(second)
            await engine.until(lambda: len(engine.asked("generate")) >= 2)
            await engine.tell(admitted(again), finished(again, "stop"))
            assert (await router.end_of(again)).reason == inference_pb2.FINISH_REASON_STOP


async def test_limits_versions_counts_and_times_travel_through(tmp_path):
    async with scripted_engine() as engine, cluster(tmp_path, attach=(engine.target,), engines=()) as running:
        replica = await running.replica(Named, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(
                replica, remaining_s=30, queue_s=20, execution_s=10, record_version=5, max_tokens=20
            )
            await engine.until(lambda: engine.asked("generate"))
            (request,) = engine.asked("generate")[0]["requests"]
            assert 29_000 < request["deadline_ms"] < 30_000
            assert 19_000 < request["queue_ms"] < 20_000
            assert request["execution_ms"] == 10_000
            await engine.tell(admitted(attempt))
            await engine.say(attempt, 1, 2, 3)
            await engine.tell({"type": "preempted", "seq": attempt, "preemptions": 1})
            await router.until(lambda: (0, 1, 0) in numbers(router))
            await engine.tell({"type": "resumed", "seq": attempt, "preemptions": 1, "cached_tokens": 8})
            seen = len(router.loads)
            await router.until(lambda: (1, 0, 25) in numbers(router)[seen:])
            await engine.tell(finished(attempt, "timeout", emitted=3, stopped_ago_s=0.05))
            ended = await router.end_of(attempt)
            assert ended.reason == inference_pb2.FINISH_REASON_DEADLINE_EXCEEDED
            assert ended.error.reason == errors_pb2.REASON_EXECUTION_TIMEOUT
            assert (ended.record_version, ended.output_tokens) == (5, 3)
            assert router.heard[attempt].admitted[0].record_version == 5
            assert 0.05 <= ended.release.ToTimedelta().total_seconds() < 5


async def test_a_gap_in_the_event_stream_costs_the_engine(tmp_path):
    async with scripted_engine() as engine, cluster(tmp_path, attach=(engine.target,), engines=()) as running:
        first = await running.replica(Named, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first)
            await engine.until(lambda: engine.asked("generate"))
            await engine.tell(finished(attempt, "stop"), skip=1)
            ended = await router.end_of(attempt, 5)
            assert ended.error.reason == errors_pb2.REASON_WORKER_LOST_BEFORE_OUTPUT
            await running.replica(Named, ReplicaState.READY, other_than=first.epoch)


def numbers(router: RawRouter) -> list[tuple[int, int, int]]:
    return [(r.active, r.waiting, r.kv_cells_reserved) for load in router.loads for r in load.replicas]
