"""Attach against a real engine: what a Router is told is exact, bounded by its credits, and ends once."""

import asyncio

import grpc
import pytest
import pytest_asyncio

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control.resources import ReplicaState
from headrace.rpc.channels import internal_channel
from support.scheduling import RawRouter, cluster, make_dispatch, synthetic

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 8
FAST = synthetic("fast", slots=SLOTS)
SLOW = synthetic("slow", rate=50, slots=SLOTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory):
    async with cluster(tmp_path_factory.mktemp("attach")) as started:
        await started.publish(FAST, SLOW)
        await started.replica(FAST, ReplicaState.READY)
        await started.replica(SLOW, ReplicaState.READY)
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def fast(running):
    return (await running.replicas())[FAST.name]


@pytest_asyncio.fixture(loop_scope="module")
async def slow(running):
    return (await running.replicas())[SLOW.name]


@pytest_asyncio.fixture(loop_scope="module")
async def router(running):
    async with RawRouter.attach(await running.endpoint()) as attached:
        yield attached


async def test_an_attempt_runs_to_its_length(router, fast):
    attempt = await router.dispatch(fast, max_tokens=100)
    ended = await router.end_of(attempt)
    heard = router.heard[attempt]
    assert ended.reason == inference_pb2.FINISH_REASON_LENGTH
    assert not ended.HasField("error")
    assert (len(heard.admitted), heard.admitted[0].prompt_tokens) == (1, 5)
    assert len(heard.tokens) == ended.usage.generated_tokens == 100
    assert ended.usage.prompt_tokens == 5
    assert heard.text.decode()
    assert ended.HasField("queue")


async def test_columns_are_the_same_alone_and_among_others(router, running, fast):
    """The pass-through of one session and the split of two give each attempt the same tokens and text."""
    prompts = [f"prompt {n}" for n in range(SLOTS)]
    alone = [await router.dispatch(fast, prompt=p, max_tokens=200) for p in prompts]
    for attempt in alone:
        await router.end_of(attempt)
    async with RawRouter.attach(await running.endpoint(), "routers/second") as second:
        both = [
            (r, await r.dispatch(fast, prompt=p, max_tokens=200))
            for r, p in zip([router, second] * (SLOTS // 2), prompts, strict=True)
        ]
        for owner, attempt in both:
            await owner.end_of(attempt)
        for first, (owner, attempt) in zip(alone, both, strict=True):
            assert owner.heard[attempt].tokens == router.heard[first].tokens
            assert owner.heard[attempt].text == router.heard[first].text
        assert not set(second.heard) & set(alone)


async def test_logprobs_travel_with_their_tokens_beside_attempts_without(router, fast):
    plain = make_dispatch(fast, max_tokens=20)
    rich = make_dispatch(fast, max_tokens=20, top_logprobs=2)
    await router.send(dispatches=[plain, rich])
    for message in (plain, rich):
        await router.end_of(message.attempt)
    heard = router.heard[rich.attempt]
    assert len(heard.logprobs) == len(heard.tokens) == 20
    assert all(value <= 0 for value in heard.logprobs)


async def test_credits_hold_an_attempt_and_let_it_go_on(router, fast):
    attempt = await router.dispatch(fast, max_tokens=50, credit=10)
    await router.until(lambda: len(router.heard[attempt].tokens) == 10)
    other = await router.dispatch(fast, max_tokens=30)
    await router.end_of(other)  # a held attempt holds nobody else
    assert len(router.heard[attempt].tokens) == 10
    await router.send(credits=[pb.Credit(attempt=attempt, limit=25)])
    await router.until(lambda: len(router.heard[attempt].tokens) == 25)
    await router.send(credits=[pb.Credit(attempt=attempt, limit=20)])  # never falls
    await router.send(credits=[pb.Credit(attempt=attempt, limit=1000)])
    assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_LENGTH
    assert len(router.heard[attempt].tokens) == 50


@pytest.mark.parametrize("cause", ["CANCELLED", "DEADLINE_EXCEEDED", "SLOW_CONSUMER"])
async def test_a_cancel_is_confirmed_with_its_cause(router, slow, cause):
    reason = inference_pb2.FinishReason.Value(f"FINISH_REASON_{cause}")
    attempt = await router.dispatch(slow, max_tokens=2000)
    await router.until(lambda: router.heard[attempt].tokens)
    await router.send(cancels=[pb.Cancel(attempt=attempt, cause=reason)] * 2)
    ended = await router.end_of(attempt, 5)
    assert ended.reason == reason
    assert ended.HasField("error")
    assert ended.usage.generated_tokens >= 1
    assert len(router.heard[attempt].ended) == 1


async def test_a_cancel_that_comes_with_its_dispatch_ends_it(router, slow):
    message = make_dispatch(slow, max_tokens=2000)
    await router.send(dispatches=[message], cancels=[pb.Cancel(attempt=message.attempt)])
    assert (await router.end_of(message.attempt, 5)).reason == inference_pb2.FINISH_REASON_CANCELLED


async def test_a_deadline_ends_an_attempt_and_one_that_has_passed_is_refused(router, slow):
    running = await router.dispatch(slow, max_tokens=2000, remaining_s=0.3)
    late = await router.dispatch(slow, remaining_s=0)
    ended = await router.end_of(late)
    assert ended.reason == inference_pb2.FINISH_REASON_DEADLINE_EXCEEDED
    assert not router.heard[late].admitted
    ended = await router.end_of(running, 5)
    assert ended.reason == inference_pb2.FINISH_REASON_DEADLINE_EXCEEDED
    assert ended.error.reason == errors_pb2.REASON_DEADLINE_EXCEEDED
    assert router.heard[running].tokens


async def test_waiting_too_long_and_running_too_long_end_differently(router, slow):
    long = [make_dispatch(slow, max_tokens=2000) for _ in range(SLOTS)]
    await router.send(dispatches=long)
    await router.until(lambda: all(router.heard[m.attempt].tokens for m in long))
    waiting = await router.dispatch(slow, queue_s=0.3, record_version=3)
    ended = await router.end_of(waiting, 5)
    assert (ended.reason, ended.error.reason) == (
        inference_pb2.FINISH_REASON_REJECTED,
        errors_pb2.REASON_QUEUE_TIMEOUT,
    )
    assert int(ended.error.metadata["waitedMs"]) >= 250
    assert (ended.record_version, ended.output_tokens, ended.HasField("release")) == (3, 0, False)
    await router.send(cancels=[pb.Cancel(attempt=m.attempt) for m in long])
    running = await router.dispatch(slow, max_tokens=2000, execution_s=0.3, record_version=4)
    ended = await router.end_of(running, 5)
    assert (ended.reason, ended.error.reason) == (
        inference_pb2.FINISH_REASON_DEADLINE_EXCEEDED,
        errors_pb2.REASON_EXECUTION_TIMEOUT,
    )
    assert (ended.record_version, ended.output_tokens) == (4, len(router.heard[running].tokens))
    assert ended.release.ToTimedelta().total_seconds() < 1
    for message in long:
        released = (await router.end_of(message.attempt)).release
        assert 0 <= released.ToTimedelta().total_seconds() < 1


async def test_a_repeated_dispatch_is_not_run_again(router, running, slow):
    message = make_dispatch(slow, max_tokens=20)
    await router.send(dispatches=[message, message])
    async with RawRouter.attach(await running.endpoint(), "routers/second") as second:
        await router.until(lambda: router.heard[message.attempt].admitted)
        await second.send(dispatches=[message])
        refused = await second.end_of(message.attempt)
        assert refused.reason == inference_pb2.FINISH_REASON_REJECTED
        assert refused.error.reason == errors_pb2.REASON_ALREADY_EXISTS
    await router.end_of(message.attempt)
    await router.send(dispatches=[message])
    marker = await router.dispatch(slow, max_tokens=1)
    await router.end_of(marker)
    heard = router.heard[message.attempt]
    assert (len(heard.ended), len(heard.tokens), len(heard.admitted)) == (1, 20, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 1}, errors_pb2.REASON_STALE_EPOCH),
        ({"replica": "replicas/other"}, errors_pb2.REASON_STALE_EPOCH),
        ({"revision": "models/x/revisions/0123456789ab"}, errors_pb2.REASON_STALE_EPOCH),
        ({"attempt": 2**63}, errors_pb2.REASON_INVALID_REQUEST),
    ],
    ids=["an old epoch", "a replica of someone else", "another revision", "a token out of range"],
)
async def test_a_dispatch_that_does_not_fit_is_refused(router, fast, change, reason):
    message = make_dispatch(fast)
    message.MergeFrom(pb.Dispatch(**change))
    await router.send(dispatches=[message])
    ended = await router.end_of(message.attempt)
    assert (ended.reason, ended.error.reason) == (inference_pb2.FINISH_REASON_REJECTED, reason)


async def test_the_engines_own_refusal_is_told_with_its_reason(router, fast):
    attempt = await router.dispatch(fast, max_tokens=100_000)
    ended = await router.end_of(attempt)
    assert ended.reason == inference_pb2.FINISH_REASON_REJECTED
    assert ended.error.reason == errors_pb2.REASON_CONTEXT_LENGTH_EXCEEDED
    assert ended.error.metadata["limitTokens"]


async def test_token_ids_and_conversations_reach_the_engine(router, fast):
    tokens = make_dispatch(fast, max_tokens=5)
    tokens.generate.ClearField("prompt")
    tokens.generate.tokens.ids.extend([1, 2, 3])
    chat = make_dispatch(fast, max_tokens=5)
    chat.generate.conversation.messages.add(role=inference_pb2.ROLE_USER, content="hi")
    empty = make_dispatch(fast)
    empty.generate.ClearField("input")
    await router.send(dispatches=[tokens, chat, empty])
    assert (await router.end_of(tokens.attempt)).usage.prompt_tokens == 3
    assert (await router.end_of(chat.attempt)).reason in (
        inference_pb2.FINISH_REASON_LENGTH,
        inference_pb2.FINISH_REASON_REJECTED,  # an engine without a template says so
    )
    assert (await router.end_of(empty.attempt)).error.reason == errors_pb2.REASON_INVALID_REQUEST


async def test_what_waits_is_bounded_and_the_load_is_told(router, slow):
    messages = [make_dispatch(slow, max_tokens=2000) for _ in range(SLOTS + 40)]
    await router.send(dispatches=messages)
    tokens = [m.attempt for m in messages]
    await router.until(lambda: sum(bool(router.heard[t].ended) for t in tokens) >= 40 - 16)
    refused = [router.heard[t].ended[0] for t in tokens if router.heard[t].ended]
    assert {e.error.reason for e in refused} == {errors_pb2.REASON_OVERLOADED}
    await router.until(
        lambda: any((r.active, r.slots) == (SLOTS, SLOTS) for load in router.loads for r in load.replicas)
    )
    await router.send(cancels=[pb.Cancel(attempt=t) for t in tokens])
    for token in tokens:
        await router.end_of(token)
    seen = len(router.loads)
    await router.until(lambda: len(router.loads) > seen)
    assert all((r.active, r.waiting, r.kv_cells_reserved) == (0, 0, 0) for r in router.loads[-1].replicas)


async def test_the_end_of_a_session_ends_its_attempts_in_the_engine(running, router, slow):
    async with RawRouter.attach(await running.endpoint(), "routers/leaver") as leaver:
        attempt = await leaver.dispatch(slow, max_tokens=2000)
        await leaver.until(lambda: leaver.heard[attempt].tokens)
        assert (await running.state()).attempts == 1
    async with asyncio.timeout(5):
        while (state := await running.state()).attempts or state.sessions != 1:
            await asyncio.sleep(0.05)


async def test_a_session_opens_with_a_hello_or_not_at_all(running):
    async with internal_channel(await running.endpoint()) as channel:
        call = SchedulerServiceStub(channel).Attach()
        await call.write(pb.AttachRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_state_names_workers_and_engines(running, fast):
    state = await running.state()
    worker = next(w for w in state.workers if w.replica == fast.name)
    assert worker.state == pb.Worker.STATE_READY
    assert worker.pid > 0
    assert '"slots": 8' in worker.engine_json


async def test_an_attempt_without_a_limit_is_bounded_by_the_dispatch(router, fast):
    message = make_dispatch(fast, max_tokens=None)
    message.output_tokens_max = 30
    await router.send(dispatches=[message])
    ended = await router.end_of(message.attempt)
    assert ended.reason == inference_pb2.FINISH_REASON_LENGTH
    assert len(router.heard[message.attempt].tokens) == 30
