"""What the Scheduler itself costs: CPU seconds of its process for 1,000 tokens, and tokens a second at full speed.

    python tests/bench/scheduler_cpu.py

etcd, the Scheduler (a process of its own, uvloop) and Triton with the synthetic engine are real; the Router is a
raw reader in this process that counts and grants credits without end.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control.resources import ReplicaState
from headrace.rpc.channels import internal_channel
from headrace.scheduler.settings import SchedulerSettings
from support.etcd import etcd_process, make_store
from support.scheduling import Cluster, make_dispatch, synthetic

STREAMS = 64
RATE = 50.0
PACED = synthetic("paced", rate=RATE, slots=STREAMS, context=16384)
FAST = synthetic("fast", slots=STREAMS, context=16384)

CHILD = """
import asyncio, json, sys, uvloop
from headrace.runtime.tasks import stop_on_signals
from headrace.runtime.telemetry import configure_logging
from headrace.scheduler.main import run
from headrace.scheduler.settings import SchedulerSettings
async def main():
    await run(SchedulerSettings.model_validate(json.loads(sys.argv[1])), stop_on_signals(asyncio.get_running_loop()))
configure_logging("scheduler", level="warning")
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


async def measure(cluster: Cluster, child: psutil.Process, revision, tokens: int) -> None:
    """Run STREAMS attempts of `tokens` tokens and print what they cost."""
    replica = await cluster.replica(revision, ReplicaState.READY)
    async with internal_channel(await cluster.endpoint()) as channel:
        call = SchedulerServiceStub(channel).Attach()
        await call.write(pb.AttachRequest(hello=pb.Hello(router="routers/bench", incarnation="i")))
        await call.read()
        messages = [make_dispatch(replica, prompt="bench", max_tokens=tokens) for _ in range(STREAMS)]
        before, started = child.cpu_times(), time.monotonic()
        await call.write(pb.AttachRequest(dispatches=messages))
        got = frames = ends = 0
        while ends < STREAMS:
            frame = await call.read()
            frames += 1
            got += len(frame.deltas.token_ids)
            ends += len(frame.ended)
        took_s, after = time.monotonic() - started, child.cpu_times()
        call.cancel()
    cpu_s = after.user + after.system - before.user - before.system
    print(
        f"{revision.model}: {got} tokens in {took_s:.2f} s, {got / took_s:,.0f} tokens/s, {frames} frames, "
        f"Scheduler CPU {cpu_s:.2f} s = {1000 * cpu_s / got:.5f} s per 1,000 tokens"
    )
    assert got == STREAMS * tokens


async def main() -> None:
    """Measure both."""
    with tempfile.TemporaryDirectory() as folder:
        async with etcd_process(Path(folder) / "etcd") as etcd, make_store(etcd.endpoint) as store:
            await store.range("snapshot/")
            settings = SchedulerSettings.model_validate(
                {
                    "etcd": (etcd.endpoint,),
                    "etcd_prefix": store._config.prefix,
                    "listen": "127.0.0.1:0",
                    "name": f"b{secrets.token_hex(4)}",
                    "state_dir": Path(folder) / "state",
                    "threads": 1,
                    "drain_grace_s": 1.0,
                }
            )
            process = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(settings.model_dump(mode="json"))])
            try:
                idle: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(3600))
                cluster = Cluster(etcd, store, settings, asyncio.Event(), idle, Path(folder))
                await cluster.publish(PACED, FAST)
                child = psutil.Process(process.pid)
                await measure(cluster, child, PACED, 500)
                await measure(cluster, child, FAST, 10_000)
                await measure(cluster, child, FAST, 10_000)
                idle.cancel()
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, 30)


if __name__ == "__main__":
    asyncio.run(main())
