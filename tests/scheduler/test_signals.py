"""What a worker says of its health while it starts, serves, stops, and while the store is away."""

import asyncio
import itertools
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control import warm_shapes
from headrace.control.resources import Replica, ReplicaState
from headrace.rpc.channels import internal_channel
from headrace.runtime import membership
from headrace.scheduler import main
from headrace.triton import engine_client
from support.scheduling import Cluster, RawRouter, cluster, synthetic
from support.scripted_engine import REVISION, admitted, finished, scripted_engine

pytestmark = pytest.mark.stack

SLOW = synthetic("slow", rate=50, slots=4)
SHAPES = {"vocabulary": 500, "shapes": {"prefill": 8, "decode": [1, 2, 4]}}


class Named:
    name = REVISION


async def health(endpoint: str) -> dict[str, bool]:
    """What each of the Scheduler's health services answers."""
    found = {}
    async with internal_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("startup", "liveness", "readiness", "lease"):
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                found[name] = answer.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:  # nothing was said yet
                    raise
    return found


async def until(look, wanted, timeout_s=20.0):
    last = None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        last = await look()
        if last == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{last} is not {wanted}")


async def only_worker(running: Cluster) -> pb.Worker:
    """The worker, once there is one."""
    async with asyncio.timeout(20):
        while not (found := (await running.state()).workers):
            await asyncio.sleep(0.05)
    return found[0]


def signals(worker: pb.Worker) -> tuple[bool, bool, bool]:
    return worker.started, worker.alive, worker.ready


@pytest.fixture(autouse=True)
def _full_context_is_cheap(monkeypatch):
    monkeypatch.setattr(warm_shapes, "FULL_CONTEXT_S", 1000.0)


async def test_no_signal_stands_for_another_from_the_start_to_the_drain(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "TICK_S", 0.05)
    async with (
        scripted_engine(**SHAPES) as engine,
        cluster(tmp_path, attach=(engine.target,), engines=()) as running,
    ):
        endpoint = await running.endpoint()
        await running.publish()
        await engine.until(lambda: engine.asked("generate"))
        worker = await only_worker(running)
        assert worker.state == pb.Worker.STATE_WARMING
        assert signals(worker) == (False, True, False)
        await until(lambda: health(endpoint), {"startup": False, "liveness": True, "readiness": False, "lease": True})

        await warm(engine)
        replica = await running.replica(Named, ReplicaState.READY)
        worker = await only_worker(running)
        assert signals(worker) == (True, True, True)
        assert worker.heard_ago.ToTimedelta().total_seconds() < 3
        assert "batches of 1, 2, 4 in" in worker.detail
        await until(lambda: health(endpoint), {"startup": True, "liveness": True, "readiness": True, "lease": True})

        async with RawRouter.attach(endpoint) as router:
            attempts = [await router.dispatch(replica) for _ in range(12)]  # a long queue is no failure
            await engine.until(lambda: engine.asked("generate")[-1]["requests"][-1]["seq"] in attempts)
            assert signals(await only_worker(running)) == (True, True, True)
            monkeypatch.setattr(main, "TICK_S", 60.0)
            await asyncio.sleep(0.2)  # from now on nothing is told by the second
            running.stop.set()
            await until(
                lambda: health(endpoint), {"startup": True, "liveness": True, "readiness": False, "lease": True}
            )
            worker = await only_worker(running)
            assert worker.state == pb.Worker.STATE_DRAINING
            assert signals(worker) == (True, True, False)
            late = await router.dispatch(replica)
            assert (await router.end_of(late)).error.reason == errors_pb2.REASON_DRAINING
            for attempt in attempts:
                await engine.tell(admitted(attempt), finished(attempt, "stop"))
                assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_STOP


async def test_ready_is_never_published_before_every_declared_shape_has_run(tmp_path):
    async with (
        scripted_engine(**SHAPES) as engine,
        cluster(tmp_path, attach=(engine.target,), engines=()) as running,
        RawRouter.attach(await running.endpoint()) as router,
    ):
        history = []
        watching = asyncio.create_task(keep_states(running, history))
        shapes = await warm(engine, after_each=lambda: refused(running, router))
        ready = await running.replica(Named, ReplicaState.READY)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert shapes == [[(8, 1)], [(1, 4), (1, 3), (1, 2), (1, 2)], [(99, 1)]]
        assert [state for state, _ in itertools.groupby([*history, ready.state.name])] == ["LOADING", "READY"]


async def test_a_warm_up_that_fails_is_a_failed_worker_and_says_why(tmp_path):
    async with (
        scripted_engine(**SHAPES) as engine,
        cluster(tmp_path, attach=(engine.target,), engines=()) as running,
    ):
        await engine.until(lambda: engine.asked("generate"))
        (request,) = engine.asked("generate")[0]["requests"]
        error = {"reason": "ENGINE_FAILED", "message": "No memory for it.", "field": "", "metadata": {}}
        await engine.tell({"type": "refused", "seq": request["seq"], "error": error})
        failed = await running.replica(Named, ReplicaState.FAILED)
        assert failed.detail == "warming up with the prefill chunk failed: No memory for it."
        assert not (await only_worker(running)).ready


async def test_a_warm_up_that_takes_too_long_is_a_failed_worker(tmp_path):
    async with (
        scripted_engine(**SHAPES) as engine,
        cluster(tmp_path, attach=(engine.target,), engines=(), warm_up_deadline_s=0.5) as running,
    ):
        failed = await running.replica(Named, ReplicaState.FAILED)
        assert failed.detail == "it was not warmed within 0.5 s"


async def test_a_warm_up_step_may_take_longer_than_a_living_engine_may_be_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "SILENCE_MAX_S", 1.0)
    monkeypatch.setattr(engine_client, "RECEIPT_MAX_S", 1.0)
    async with (
        scripted_engine(**SHAPES) as engine,
        cluster(tmp_path, attach=(engine.target,), engines=()) as running,
    ):
        await engine.until(lambda: engine.asked("generate"))
        engine.is_mute = True
        await asyncio.sleep(2.5)
        assert (await only_worker(running)).state == pb.Worker.STATE_WARMING
        await warm(engine)
        await running.replica(Named, ReplicaState.READY)
        assert engine.streams == 1
        await running.replica(Named, ReplicaState.FAILED, timeout_s=5)  # and then it is death


async def test_a_real_engine_runs_its_shapes_and_says_so(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        await running.replica(SLOW, ReplicaState.READY)
        worker = await only_worker(running)
        assert worker.detail.startswith("warmed up: chunk of ")
        assert "batches of 1, 2, 4 in" in worker.detail
        assert signals(worker) == (True, True, True)
        assert worker.memory_bytes > 10 << 20


async def test_a_partition_from_the_store_is_told_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "TICK_S", 0.1)
    monkeypatch.setattr(membership.Membership.__init__, "__defaults__", (3,))
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        endpoint = await running.endpoint()
        record = await running.store.get(f"services/schedulers/{running.settings.name}")
        metrics = resources_pb2.ServiceRecord.FromString(record.value).metrics_endpoint
        assert (await running.state()).lease == pb.GetStateResponse.LEASE_HELD
        assert sample(await scrape(metrics), "headrace_scheduler_lease_held") == 1.0
        await running.etcd.kill()
        await until(lambda: health(endpoint), {"startup": True, "liveness": True, "readiness": True, "lease": False})
        async with internal_channel(endpoint) as channel:
            state = await state_of(channel)
        assert state.lease == pb.GetStateResponse.LEASE_UNCERTAIN
        assert 2.0 < state.lease_age.ToTimedelta().total_seconds() < 15
        assert signals(state.workers[0]) == (True, True, True)
        text = await scrape(metrics)
        assert sample(text, "headrace_scheduler_lease_held") == 0.0
        assert sample(text, "headrace_scheduler_lease_age_seconds") > 2.0
        async with RawRouter.attach(endpoint) as router:
            attempt = await router.dispatch(replica, max_tokens=5)
            assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_LENGTH
        await running.etcd.start()
        await until(lambda: health(endpoint), {"startup": True, "liveness": True, "readiness": True, "lease": True})


async def warm(engine, after_each=None) -> list[list[tuple[int, int]]]:
    """Let each group of a warm-up end; returns, group by group, prompt and output lengths."""
    groups, seen = [], 0
    for size in (1, 4, 1):  # the chunk, the batches, the full context
        await engine.until(lambda begin=seen, size=size: len(submitted(engine)) == begin + size)
        group = submitted(engine)[seen:]
        groups.append([(r["prompt_tokens"], r["max_tokens"]) for r in group])
        if after_each is not None:
            await after_each()
        for request in group:
            await engine.tell(admitted(request["seq"]), finished(request["seq"], "length"))
        seen += size
    return groups


def submitted(engine) -> list[dict]:
    """Every REQUEST that came."""
    return [request for document in engine.asked("generate") for request in document["requests"]]


async def refused(running: Cluster, router: RawRouter) -> None:
    """An attempt that is sent to a worker that warms up is refused."""
    replica = (await running.replicas()).get(REVISION)
    if replica is not None:
        attempt = await router.dispatch(replica)
        assert (await router.end_of(attempt)).error.reason == errors_pb2.REASON_STALE_EPOCH


async def keep_states(running: Cluster, history: list[str]) -> None:
    """Each state of the replica that the store had."""
    while True:
        replica: Replica | None = (await running.replicas()).get(REVISION)
        if replica is not None:
            history.append(replica.state.name)
        await asyncio.sleep(0.002)


async def scrape(address: str) -> str:
    return await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())


def sample(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[1])


async def state_of(channel) -> pb.GetStateResponse:
    return await SchedulerServiceStub(channel).GetState(pb.GetStateRequest(), timeout=5)
