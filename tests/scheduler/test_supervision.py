"""A Scheduler sees what goes wrong with its engines, within a stated time, and every attempt ends truthfully."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control import reconcile, worker_lifecycle
from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, ReplicaState, Revision
from headrace.control.worker_health import SILENCE_MAX_S
from headrace.scheduler import main, worker
from headrace.scheduler.relay import Relay
from headrace.triton.group import members
from headrace.triton.runtimes import runtime_name
from support.scheduling import RawRouter, cluster, synthetic
from support.scripted_engine import REVISION, admitted, finished, scripted_engine

pytestmark = pytest.mark.stack

SLOW = synthetic("slow", rate=50, slots=4)


class Named:
    name = REVISION


def unloadable(model: str = "bad") -> tuple[Revision, Artifact]:
    """A revision whose weights are not there."""
    file = ArtifactFile("weights.gguf", 1000, "ab" * 32, FileKind.WEIGHTS)
    artifact = Artifact(files=(file,), location="/nowhere")
    return Revision(model, artifact.name, artifact.digest, Execution(Engine.LLAMACPP, 256, 1, 256)), artifact


async def state_when(running, condition, timeout_s=30.0) -> pb.GetStateResponse:
    deadline = time.monotonic() + timeout_s
    while True:
        state = await running.state()
        if condition(state):
            return state
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.05)


async def test_an_engine_that_hangs_is_given_up_within_its_silence(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first, max_tokens=2000)
            await router.until(lambda: router.heard[attempt].tokens)
            (told,) = (await running.state()).workers
            (stub,) = (pid for pid in members(told.pid) if pid != told.pid)
            stopped_at = time.monotonic()
            os.kill(stub, signal.SIGSTOP)
            assert (await router.end_of(attempt, 10)).reason == inference_pb2.FINISH_REASON_INTERRUPTED
            took_s = time.monotonic() - stopped_at
            print(f"hung engine: {took_s:.2f} s")
            assert SILENCE_MAX_S - 0.7 < took_s < SILENCE_MAX_S + 1.5
            second = await running.replica(SLOW, ReplicaState.READY, other_than=first.epoch)
            again = await router.dispatch(second, max_tokens=5)
            assert (await router.end_of(again)).reason == inference_pb2.FINISH_REASON_LENGTH
        assert not members(told.pid)


async def test_a_killed_server_is_seen_at_once(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first, max_tokens=2000)
            await router.until(lambda: router.heard[attempt].tokens)
            pid = (await running.state()).workers[0].pid
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            assert (await router.end_of(attempt, 10)).reason == inference_pb2.FINISH_REASON_INTERRUPTED
            took_s = time.monotonic() - killed_at
            print(f"killed server: {took_s:.3f} s")
            assert took_s < 1.0


@pytest.mark.parametrize("hard", [1e9, 0.0], ids=["attempts finish", "it grows on"])
async def test_a_worker_that_takes_too_much_memory_is_started_again(tmp_path, monkeypatch, hard):
    monkeypatch.setattr(worker, "MEMORY_LOOK_S", 0.2)
    monkeypatch.setattr(worker, "MEMORY_HARD", hard)
    used = [0]
    real = worker.Worker.memory_bytes
    monkeypatch.setattr(worker.Worker, "memory_bytes", lambda self: real(self) + used[0])
    async with cluster(tmp_path, worker_memory_mib=4096) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first, max_tokens=150)
            await router.until(lambda: router.heard[attempt].tokens)
            used[0] = 8192 << 20
            draining = await running.replica(SLOW, ReplicaState.DRAINING, timeout_s=5)
            assert "more than its limit of 4096 MiB" in draining.detail
            ended = await router.end_of(attempt)
            if hard:
                assert ended.reason == inference_pb2.FINISH_REASON_LENGTH
            else:
                assert ended.reason == inference_pb2.FINISH_REASON_INTERRUPTED
            used[0] = 0
            second = await running.replica(SLOW, ReplicaState.READY, other_than=first.epoch)
            again = await router.dispatch(second, max_tokens=5)
            assert (await router.end_of(again)).reason == inference_pb2.FINISH_REASON_LENGTH
        assert (await running.state()).workers[0].restarts == 1


async def test_a_real_limit_that_is_too_low_recycles_a_real_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "MEMORY_LOOK_S", 0.1)
    async with cluster(tmp_path, worker_memory_mib=1) as running:
        await running.publish(SLOW)
        failed = await running.replica(SLOW, ReplicaState.FAILED)
        assert "MiB, more than its limit of 1 MiB" in failed.detail


async def test_a_revision_that_does_not_load_is_isolated_told_and_takes_nothing_away(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_lifecycle, "BACKOFF_FIRST_S", 0.01)
    bad, artifact = unloadable()
    other = synthetic("other", rate=50, slots=4)
    async with cluster(tmp_path) as running:
        await running.publish(SLOW, other)
        good = await running.replica(SLOW, ReplicaState.READY)
        await running.replica(other, ReplicaState.READY)
        await running.publish(bad, other, artifacts=(artifact,), kept=(SLOW,), moved={"slow": bad}, last_good=(SLOW,))
        state = await state_when(running, lambda s: any(w.crash_loop for w in s.workers))
        (loop,) = (w for w in state.workers if w.crash_loop)
        assert loop.revision == bad.name
        assert loop.detail.startswith("CRASH_LOOP: failed 5 times, tried again each minute: ")
        assert "weights.gguf" in loop.detail
        assert (loop.started, loop.alive, loop.ready) == (True, False, False)
        assert {w.revision for w in state.workers if w.ready} == {SLOW.name, other.name}
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(good, max_tokens=5)  # by the revision's own name, or of an older snapshot
            assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_LENGTH


async def test_an_old_revision_is_stopped_once_the_new_one_is_ready_in_the_snapshot(tmp_path):
    new = synthetic("new", rate=50, slots=4)
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        await running.replica(SLOW, ReplicaState.READY)
        await running.publish(new, kept=(SLOW,), moved={"slow": new}, last_good=(SLOW,))
        ready = await running.replica(new, ReplicaState.READY)
        assert {w.revision for w in (await running.state()).workers if w.ready} == {SLOW.name, new.name}
        await running.publish(new, kept=(SLOW,), moved={"slow": new}, replicas=(ready,))
        await state_when(running, lambda s: {w.revision for w in s.workers} == {new.name})


async def test_a_scheduler_that_has_just_started_serves_what_was_good_last(tmp_path):
    bad, artifact = unloadable()
    async with cluster(tmp_path) as running:
        await running.publish(bad, artifacts=(artifact,), kept=(SLOW,), moved={"slow": bad}, last_good=(SLOW,))
        await running.replica(SLOW, ReplicaState.READY)
        await running.replica(bad, ReplicaState.FAILED)


async def test_a_revision_that_was_made_for_another_runtime_is_not_loaded(tmp_path):
    other = replace(synthetic("other", rate=50, slots=4), runtime="triton-9/llama-9")
    here = replace(synthetic("here", rate=50, slots=4), runtime=runtime_name(Engine.SYNTHETIC))
    async with cluster(tmp_path) as running:
        await running.publish(other, here)
        await running.replica(here, ReplicaState.READY)
        failed = await running.replica(other, ReplicaState.FAILED)
        assert f"was made for triton-9/llama-9; this Scheduler has {here.runtime}" in failed.detail


async def test_what_is_named_comes_before_what_was_good_last(tmp_path):
    new = synthetic("new", rate=50, slots=4)
    async with cluster(tmp_path, workers_max=1) as running:
        await running.publish(SLOW)
        await running.replica(SLOW, ReplicaState.READY)
        await running.publish(new, kept=(SLOW,), moved={"slow": new}, last_good=(SLOW,))
        await running.replica(new, ReplicaState.READY)
        assert set(await running.replicas()) == {new.name}


async def test_a_revoked_revision_starts_nothing_even_for_a_router_that_has_not_heard(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        await running.publish(SLOW, revoked=(SLOW.name,))
        async with RawRouter.attach(await running.endpoint()) as router:

            async def reason_now() -> int:
                return (await router.end_of(await router.dispatch(replica, max_tokens=1))).error.reason

            async with asyncio.timeout(10):
                while await reason_now() != errors_pb2.REASON_REVOKED:
                    await asyncio.sleep(0.05)


async def test_orphans_in_the_engine_are_cancelled_and_attempts_that_it_does_not_know_end(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "TICK_S", 0.05)
    monkeypatch.setattr(reconcile, "LOOK_EVERY_S", 0.3)
    async with scripted_engine() as engine, cluster(tmp_path, attach=(engine.target,), engines=()) as running:
        replica = await running.replica(Named, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            known = await router.dispatch(replica)
            unknown = await router.dispatch(replica)
            await engine.until(lambda: sum(len(g["requests"]) for g in engine.asked("generate")) == 2)
            await engine.tell(admitted(known))
            for n in (1, 2, 3):  # the first question may have been older than the attempts
                await engine.until(lambda n=n: len(engine.asked("list")) >= n)
                await engine.tell({"type": "sequences", "seqs": [known, 77]})
            ended = await router.end_of(unknown)
            assert ended.error.reason == errors_pb2.REASON_WORKER_LOST_BEFORE_OUTPUT
            await engine.until(lambda: engine.asked("cancel"))
            assert engine.asked("cancel")[0]["seqs"] == [77]
            state = await running.state()
            assert (state.attempts_unknown, state.attempts) == (1, 1)
            assert state.orphans_cancelled >= 1
            await engine.tell(finished(known, "stop"))
            assert (await router.end_of(known)).reason == inference_pb2.FINISH_REASON_STOP


async def test_a_real_engine_lets_go_of_what_the_scheduler_has_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "TICK_S", 0.05)
    monkeypatch.setattr(reconcile, "LOOK_EVERY_S", 0.3)
    relays, open_engine = [], Relay.open_engine

    def keep(self, book, engine):
        relays.append(self)
        open_engine(self, book, engine)

    monkeypatch.setattr(Relay, "open_engine", keep)
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempts = [await router.dispatch(replica, max_tokens=2000) for _ in range(3)]
            await router.until(lambda: all(router.heard[a].tokens for a in attempts))
            await asyncio.sleep(1.5)  # several looks
            assert (await running.state()).orphans_cancelled == 0
            relay = relays[-1]
            relay.ledger.finish(attempts[0], relay.ledger.attempts[attempts[0]].incarnation)
            await state_when(running, lambda s: s.orphans_cancelled)
            (client,) = relay._engines.values()
            async with asyncio.timeout(5):
                while client.stats.get("active") != 2:
                    await asyncio.sleep(0.05)
            assert not router.heard[attempts[1]].ended
            assert (await running.state()).orphans_cancelled == 1
