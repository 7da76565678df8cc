"""tritonserver as a child: it starts, says why it did not, ends when told, and never outlives its Scheduler."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.triton import process, shared_memory
from headrace.triton.group import members
from headrace.triton.process import TritonPlan, TritonProcess, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, prepare_triton

pytestmark = pytest.mark.stack

CONFIG = """
name: "llm" backend: "python" max_batch_size: 0
model_transaction_policy { decoupled: true }
instance_group [ { count: 1, kind: KIND_CPU } ]
input [ { name: "op", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "reply", data_type: TYPE_STRING, dims: [ 1 ] } ]
"""
MODEL = """
import json, os
class TritonPythonModel:
    def initialize(self, args):
        config = json.load(open(os.environ["HEADRACE_ENGINE_CONFIG"]))
        if config.get("wrong"):
            raise ValueError("slots must be 1 or more, got 0")
    def execute(self, requests):
        return None
"""


def repository(root: Path) -> Path:
    version = root / "llm" / "1"
    version.mkdir(parents=True)
    (root / "llm" / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL)
    return root


def plan(tmp_path: Path, **config: object) -> TritonPlan:
    return TritonPlan(
        files=prepare_triton(DEFAULT_CACHE_DIR),
        model_repository=repository(tmp_path / "repository"),
        engine_config=config,
        directory=tmp_path / "worker",
        threads=1,
    )


async def ready(triton: TritonProcess) -> None:
    async with asyncio.timeout(60), grpc.aio.insecure_channel(triton.target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while not triton.has_exited:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.ModelReady(
                    service_pb2.ModelReadyRequest(name="llm"), wait_for_ready=True, timeout=5
                )
                if answer.ready:
                    return
            await asyncio.sleep(0.05)
    pytest.fail(triton.failure())


def group_members(group: int) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "pgid=,stat=,pid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [" ".join(row) for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


async def until(condition, deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_server_starts_and_stops_and_leaves_nothing(tmp_path):
    triton = start_triton(plan(tmp_path))
    await ready(triton)
    regions = list(shared_memory.DIRECTORY.glob(triton._shm_prefix + "*"))
    assert regions
    async with grpc.aio.insecure_channel(triton.target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="llm"), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await triton.stop(grace_s=20)
    assert triton.returncode == 0
    assert not group_members(triton.pid)
    assert not list(shared_memory.DIRECTORY.glob(triton._shm_prefix + "*"))


async def test_a_failed_load_ends_the_server_with_the_engines_own_sentence(tmp_path):
    triton = start_triton(plan(tmp_path, wrong=True))
    async with asyncio.timeout(60):
        assert await triton.wait_exit() != 0
    assert triton.failure() == "the engine did not load: slots must be 1 or more, got 0"


async def test_a_killed_server_is_noticed_and_swept(tmp_path):
    triton = start_triton(plan(tmp_path))
    await ready(triton)
    os.kill(triton.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        assert await triton.wait_exit() == -signal.SIGKILL
    assert "SIGKILL" in triton.failure()
    await until(lambda: not group_members(triton.pid))
    assert not list(shared_memory.DIRECTORY.glob(triton._shm_prefix + "*"))


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    triton = start_triton(plan(tmp_path))
    await ready(triton)
    os.kill(triton.pid, signal.SIGSTOP)
    await triton.stop(grace_s=0.2)
    assert triton.returncode == -signal.SIGKILL
    await until(lambda: not group_members(triton.pid))


STUBBORN = """
import signal, time
class TritonPythonModel:
    def initialize(self, args):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    def execute(self, requests):
        return None
    def finalize(self):
        while True:
            time.sleep(1)
"""


async def test_a_stub_that_does_not_end_and_ignores_sigterm_is_killed_with_its_server(tmp_path):
    planned = plan(tmp_path)
    (planned.model_repository / "llm" / "1" / "model.py").write_text(STUBBORN)
    triton = start_triton(planned)
    await ready(triton)
    assert len(group_members(triton.pid)) >= 2
    began = time.monotonic()
    await triton.stop(grace_s=1.0)
    assert 0.9 < time.monotonic() - began < 3.0
    assert triton.has_exited
    await until(lambda: not group_members(triton.pid))
    assert not list(shared_memory.DIRECTORY.glob(triton._shm_prefix + "*"))


async def test_a_child_that_ends_is_told_at_once(tmp_path):
    triton = start_triton(plan(tmp_path))
    await ready(triton)
    assert triton.memory_bytes() > 5 << 20
    triton.watch_children()
    (stub,) = (pid for pid in members(triton.pid) if pid != triton.pid)
    told = asyncio.create_task(triton.wait_crippled())
    await asyncio.sleep(0)
    assert not told.done()
    os.kill(stub, signal.SIGKILL)
    async with asyncio.timeout(1):
        await told
    assert not triton.has_exited
    await triton.stop(grace_s=0.5)
    assert triton.memory_bytes() == 0


SCHEDULER = """
import asyncio, sys
from pathlib import Path
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton
async def main():
    config = {"engine": "synthetic", "revision": "r", "incarnation": "i", "slots": 4, "context_tokens": 1000}
    files, repository = prepare_triton(DEFAULT_CACHE_DIR), find_model_repository(None)
    triton = start_triton(TritonPlan(files, repository, config, Path(sys.argv[1]) / "worker", 1))
    print(triton.pid, triton.target, triton._shm_prefix, flush=True)
    await triton.wait_exit()
asyncio.run(main())
"""


async def test_neither_server_nor_engine_survives_a_scheduler_that_is_killed(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    scheduler = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert scheduler.stdout is not None
        pid, target, prefix = (await asyncio.to_thread(scheduler.stdout.readline)).split()
        async with asyncio.timeout(60), grpc.aio.insecure_channel(target) as channel:
            stub, is_ready = service_pb2_grpc.GRPCInferenceServiceStub(channel), False
            while not is_ready:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    asked = service_pb2.ModelReadyRequest(name="llm")
                    is_ready = (await stub.ModelReady(asked, wait_for_ready=True, timeout=5)).ready
        assert len(group_members(int(pid))) >= 2, "the server and its engine's process"
    finally:
        scheduler.kill()
        scheduler.wait()
        scheduler.stdout.close()
    await until(lambda: not group_members(int(pid)))
    shared_memory.sweep_leaked()
    assert not list(shared_memory.DIRECTORY.glob(prefix + "*"))


def test_a_log_that_grows_is_cut_and_its_newest_part_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LOG_BYTES_MAX", 100)
    monkeypatch.setattr(process, "_LOG_KEPT_BYTES", 10)
    log = tmp_path / "triton.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 95 + b"0123456789")
        process.bound_log(log)
        writer.write(b"next")
    assert log.read_bytes() == b"next"
    assert (tmp_path / "triton.log.1").read_bytes() == b"0123456789"
