"""Workers that fail, restart and drain: every attempt ends truthfully, and nothing is left behind."""

import asyncio
import hashlib
import os
import signal
import subprocess
import time
import urllib.request

import grpc
import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, ReplicaState, Revision
from headrace.control.worker_health import SILENCE_MAX_S
from headrace.scheduler import fleet
from headrace.scheduler.engine_config import engine_config
from headrace.scheduler.relay import Relay
from headrace.triton import shared_memory
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton
from support.scheduling import RawRouter, cluster, synthetic

pytestmark = pytest.mark.stack

SLOW = synthetic("slow", rate=50, slots=4)


def children(pid: int) -> set[int]:
    """Pids of the processes in the group that `pid` leads."""
    rows = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in rows.splitlines()]
    return {int(row[2]) for row in fields if int(row[0]) == pid and not row[1].startswith("Z")}


def regions() -> set[str]:
    return {path.name for path in shared_memory.DIRECTORY.glob(f"headrace_*_{os.getpid()}_*")}


async def test_a_killed_triton_ends_its_attempts_truthfully_and_comes_back_under_a_new_epoch(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            with_output = [await router.dispatch(first, max_tokens=2000) for _ in range(4)]
            await router.until(lambda: all(router.heard[a].tokens for a in with_output))
            without = await router.dispatch(first, max_tokens=2000)
            cancelled = with_output.pop()
            (worker,) = (await running.state()).workers
            os.kill(worker.pid, signal.SIGSTOP)  # so that the cancel cannot be confirmed
            await router.send(cancels=[pb.Cancel(attempt=cancelled)])
            os.kill(worker.pid, signal.SIGKILL)
            for attempt in with_output:
                ended = await router.end_of(attempt, 5)
                assert ended.reason == inference_pb2.FINISH_REASON_INTERRUPTED
                assert ended.error.reason == errors_pb2.REASON_STREAM_INTERRUPTED
            ended = await router.end_of(without, 5)
            assert ended.reason == inference_pb2.FINISH_REASON_FAILED
            assert ended.error.reason == errors_pb2.REASON_WORKER_LOST_BEFORE_OUTPUT

            second = await running.replica(SLOW, ReplicaState.READY, other_than=first.epoch)
            assert second.epoch > first.epoch
            stale = await router.dispatch(first)
            assert (await router.end_of(stale)).error.reason == errors_pb2.REASON_STALE_EPOCH
            again = await router.dispatch(second, max_tokens=5)
            assert (await router.end_of(again)).reason == inference_pb2.FINISH_REASON_LENGTH
            assert all(len(heard.ended) == 1 for heard in router.heard.values())
        (worker,) = (await running.state()).workers
        assert worker.restarts == 1


async def test_a_stub_that_dies_alone_is_noticed_at_once_though_triton_says_nothing(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first, max_tokens=2000)
            await router.until(lambda: router.heard[attempt].tokens)
            (worker,) = (await running.state()).workers
            (stub,) = children(worker.pid) - {worker.pid}
            killed_at = time.monotonic()
            os.kill(stub, signal.SIGKILL)
            assert (await router.end_of(attempt, 10)).reason == inference_pb2.FINISH_REASON_INTERRUPTED
            assert time.monotonic() - killed_at < SILENCE_MAX_S / 2
            await running.replica(SLOW, ReplicaState.READY, other_than=first.epoch)


async def test_a_stop_drains_and_leaves_nothing(tmp_path):
    async with cluster(tmp_path, drain_grace_s=1.0) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        assert replica.guided == {"choice"}, "what the engine says that it can do"
        (worker,) = (await running.state()).workers
        group = children(worker.pid)
        assert len(group) >= 2
        async with RawRouter.attach(await running.endpoint()) as router:
            short = await router.dispatch(replica, max_tokens=25)
            long = await router.dispatch(replica, max_tokens=5000)
            await router.until(lambda: router.heard[short].tokens and router.heard[long].tokens)
            running.stop.set()
            await running.replica(SLOW, ReplicaState.DRAINING, timeout_s=5)
            late = await router.dispatch(replica)
            assert (await router.end_of(late, 5)).error.reason == errors_pb2.REASON_DRAINING
            assert (await router.end_of(short, 5)).reason == inference_pb2.FINISH_REASON_LENGTH
            ended = await router.end_of(long, 10)
            assert ended.reason == inference_pb2.FINISH_REASON_DRAINED
            assert ended.error.reason == errors_pb2.REASON_DRAINING
            assert ended.usage.generated_tokens >= len(router.heard[long].tokens) > 25
            await router.until(lambda: router.error is not None, 15)
            assert router.error.code() is grpc.StatusCode.UNAVAILABLE
        await running.end()
        assert not children(worker.pid)
        assert not regions()
        assert not (await running.store.range("replicas/")).items
        assert not (await running.store.range("services/")).items


async def test_a_revision_that_no_alias_names_is_drained_and_another_takes_its_place(tmp_path):
    other = synthetic("other", rate=50, slots=4)
    async with cluster(tmp_path, workers_max=1) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(replica, max_tokens=50)
            await router.until(lambda: router.heard[attempt].tokens)
            await running.publish(other)
            assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_LENGTH
        await running.replica(other, ReplicaState.READY)
        assert set(await running.replicas()) == {other.name}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(b"short"), "has 5 bytes, but"),
        (lambda path: path.write_bytes(b"x" * 1000), "is not what artifacts/"),
    ],
    ids=["a missing file", "a wrong size", "other bytes of the same size"],
)
async def test_a_wrong_model_file_fails_the_replica_in_plain_words(tmp_path, damage, sentence):
    weights = tmp_path / "artifact" / "weights.gguf"
    weights.parent.mkdir()
    weights.write_bytes(b"w" * 1000)
    digest = hashlib.sha256(b"w" * 1000).hexdigest()
    artifact = Artifact(
        files=(ArtifactFile("weights.gguf", 1000, digest, FileKind.WEIGHTS),), location=str(weights.parent)
    )
    execution = Execution(Engine.LLAMACPP, context_tokens=256, slots=1, kv_cells=256)
    revision = Revision("bad", artifact.name, artifact.digest, execution)
    damage(weights)
    async with cluster(tmp_path) as running:
        await running.publish(revision, artifacts=(artifact,))
        failed = await running.replica(revision, ReplicaState.FAILED)
        assert sentence in failed.detail
        assert "weights.gguf" in failed.detail


async def test_a_triton_that_runs_already_is_attached_and_left_running(tmp_path):
    triton = start_triton(
        TritonPlan(
            files=prepare_triton(DEFAULT_CACHE_DIR),
            model_repository=find_model_repository(None),
            engine_config=engine_config(SLOW, None, threads=1, incarnation="i"),
            directory=tmp_path / "worker",
            threads=1,
        )
    )
    try:
        async with cluster(tmp_path, attach=(triton.target,), engines=()) as running:
            await running.publish(SLOW)
            replica = await running.replica(SLOW, ReplicaState.READY)
            async with RawRouter.attach(await running.endpoint()) as router:
                attempt = await router.dispatch(replica, max_tokens=5)
                assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_LENGTH
            assert (await running.state()).workers[0].pid == 0
            await running.end()
            assert not triton.has_exited
    finally:
        await triton.stop(10)


async def test_an_outage_of_etcd_stops_no_attempt(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        endpoint = await running.endpoint()
        async with RawRouter.attach(endpoint) as router:
            attempt = await router.dispatch(replica, max_tokens=100)
            await router.until(lambda: router.heard[attempt].tokens)
            await running.etcd.kill()
            during = await router.dispatch(replica, max_tokens=20)
            for one in (attempt, during):
                assert (await router.end_of(one)).reason == inference_pb2.FINISH_REASON_LENGTH
            await running.etcd.start()
            assert (await running.replica(SLOW, ReplicaState.READY)).epoch == replica.epoch
            after = await router.dispatch(replica, max_tokens=5)
            assert (await router.end_of(after)).reason == inference_pb2.FINISH_REASON_LENGTH
            await asyncio.sleep(0)


async def test_a_bug_in_a_workers_task_ends_its_attempts_and_the_worker_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "REMAKE_S", 0.2)
    on_batch, broken = Relay.on_batch, []

    def break_once(self, replica, incarnation, batch):
        on_batch(self, replica, incarnation, batch)
        if batch.seqs and not broken:
            broken.append(1)
            raise ValueError("the text of a prompt")

    monkeypatch.setattr(Relay, "on_batch", break_once)
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        first = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(first, max_tokens=2000)
            assert (await router.end_of(attempt)).reason == inference_pb2.FINISH_REASON_INTERRUPTED
            second = await running.replica(SLOW, ReplicaState.READY, other_than=first.epoch)
            again = await router.dispatch(second, max_tokens=5)
            assert (await router.end_of(again)).reason == inference_pb2.FINISH_REASON_LENGTH


async def test_a_bug_in_a_session_shows_an_error_id_and_nothing_else(tmp_path, monkeypatch):
    def broken(self, session, frame):
        raise ValueError("the text of a prompt")

    async with cluster(tmp_path) as running:
        async with RawRouter.attach(await running.endpoint()) as router:
            monkeypatch.setattr(Relay, "take", broken)
            await router.send(cancels=[pb.Cancel(attempt=1)])
            await router.until(lambda: router.error is not None)
            assert router.error.code() is grpc.StatusCode.INTERNAL
            assert "prompt" not in router.error.details()
        async with asyncio.timeout(5):
            while (await running.state()).sessions:
                await asyncio.sleep(0.05)


async def test_metrics_have_bounded_labels_and_no_ids(tmp_path):
    async with cluster(tmp_path) as running:
        await running.publish(SLOW)
        replica = await running.replica(SLOW, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            attempt = await router.dispatch(replica, max_tokens=10)
            await router.end_of(attempt)
            record = await running.store.get(f"services/schedulers/{running.settings.name}")
            assert record is not None
            address = resources_pb2.ServiceRecord.FromString(record.value).metrics_endpoint
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
        lines = [line for line in text.splitlines() if line.startswith("headrace_")]
        assert 'headrace_scheduler_attempts_ended_total{finish_reason="LENGTH",reason="NONE"} 1.0' in lines
        assert "headrace_scheduler_tokens_total 10.0" in lines
        assert f'headrace_scheduler_workers{{revision="{SLOW.name}",state="ready"}} 1.0' in lines
        labels = {
            pair.partition("=")[0] for line in lines if "{" in line for pair in line[line.index("{") + 1 :].split(",")
        }
        assert labels <= {"finish_reason", "reason", "revision", "state", "le", "priority", "stage"}
        assert str(attempt) not in text
        assert replica.name not in text
