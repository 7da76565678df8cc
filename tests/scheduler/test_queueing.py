"""What waits for a real engine: in whose turn it is admitted, what is refused at once, and that nothing is left."""

import time

import pytest
import pytest_asyncio

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.resources import ReplicaState
from support.scheduling import RawRouter, cluster, make_dispatch, synthetic

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 2
QUEUE = 8
SLOW = synthetic("slow", rate=100, slots=SLOTS)
CRITICAL, STANDARD, SHEDDABLE = (
    inference_pb2.PRIORITY_CRITICAL,
    inference_pb2.PRIORITY_STANDARD,
    inference_pb2.PRIORITY_SHEDDABLE,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory):
    async with cluster(tmp_path_factory.mktemp("queueing"), queue_requests_max=QUEUE) as started:
        await started.publish(SLOW)
        await started.replica(SLOW, ReplicaState.READY)
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def slow(running):
    return (await running.replicas())[SLOW.name]


@pytest_asyncio.fixture(loop_scope="module")
async def router(running):
    async with RawRouter.attach(await running.endpoint()) as attached:
        yield attached
        await attached.until(lambda: not any(_numbers(load) for load in attached.loads[-1].replicas), 15)
    assert (await running.state()).attempts == 0


def _numbers(load):
    return load.active + load.waiting + load.kv_cells_reserved + load.waiting_tokens


def asks(replica, count, *, priority=STANDARD, tenant="tenants/a", max_tokens=10, **fields):
    messages = [make_dispatch(replica, max_tokens=max_tokens, **fields) for _ in range(count)]
    for message in messages:
        message.priority, message.tenant = priority, tenant
    return messages


async def fill(router, replica, max_tokens=60):
    """All slots run, and one is ahead."""
    running = asks(replica, SLOTS, max_tokens=max_tokens)
    await router.send(dispatches=running)
    await router.until(lambda: all(router.heard[m.attempt].tokens for m in running))
    (ahead,) = asks(replica, 1)
    await router.send(dispatches=[ahead])
    return [*running, ahead]


async def test_the_urgent_overtake_and_tenants_take_turns(router, slow):
    await fill(router, slow)
    heavy = asks(slow, 4, tenant="tenants/heavy", max_tokens=600)
    light = asks(slow, 1, tenant="tenants/light")
    urgent = asks(slow, 1, priority=CRITICAL)
    await router.send(dispatches=heavy)
    await router.send(dispatches=light)
    await router.send(dispatches=urgent)
    await router.until(lambda: all(router.heard[m.attempt].tokens for m in (*light, *urgent)), 10)
    assert sum(bool(router.heard[m.attempt].admitted) for m in heavy) <= 1
    await router.send(cancels=[pb.Cancel(attempt=m.attempt) for m in heavy])
    for message in heavy:
        ended = await router.end_of(message.attempt, 5)
        assert ended.error.reason == errors_pb2.REASON_CLIENT_CANCELLED


async def test_a_full_queue_refuses_at_once_and_the_urgent_take_a_place_in_it(router, slow):
    busy = await fill(router, slow, max_tokens=2000)
    waiting = asks(slow, QUEUE - 1, priority=SHEDDABLE)
    await router.send(dispatches=waiting)
    (refused,) = asks(slow, 1, priority=SHEDDABLE)
    asked_at = time.monotonic()
    await router.send(dispatches=[refused])
    error = (await router.end_of(refused.attempt, 5)).error
    took_s = time.monotonic() - asked_at
    assert (error.reason, error.metadata["stage"]) == (errors_pb2.REASON_OVERLOADED, "requests")
    assert (error.metadata["queueDepth"], error.metadata["limit"]) == (str(QUEUE), str(QUEUE))
    assert error.HasField("retry_delay")
    assert took_s < 1
    (urgent,) = asks(slow, 1, priority=CRITICAL)
    await router.send(dispatches=[urgent])
    error = (await router.end_of(waiting[-1].attempt, 5)).error
    assert (error.reason, error.metadata["stage"]) == (errors_pb2.REASON_OVERLOADED, "shed")
    everything = [*busy, *waiting, urgent]
    await router.send(cancels=[pb.Cancel(attempt=m.attempt) for m in everything])
    for message in everything:
        await router.end_of(message.attempt, 5)


async def test_what_cannot_be_in_time_is_refused_once_it_was_measured(router, slow):
    for message in (learned := asks(slow, 10, max_tokens=50)):
        await router.send(dispatches=[message])
        await router.end_of(message.attempt)
    assert len({m.attempt for m in learned}) == 10
    (hopeless,) = asks(slow, 1, max_tokens=50, remaining_s=0.2)  # 50 tokens at 100 a second
    (ample,) = asks(slow, 1, max_tokens=50, remaining_s=5.0)
    await router.send(dispatches=[hopeless, ample])
    ended = await router.end_of(hopeless.attempt, 5)
    assert ended.error.reason == errors_pb2.REASON_DEADLINE_UNMEETABLE
    assert 350 < int(ended.error.metadata["expectedMs"]) < 2000
    assert int(ended.error.metadata["remainingMs"]) <= 200
    assert not router.heard[hopeless.attempt].admitted
    assert (await router.end_of(ample.attempt)).reason == inference_pb2.FINISH_REASON_LENGTH
    report = router.loads[-1]
    assert report.routers == 1
    assert report.replicas[0].prefill_tokens_per_second > 0
