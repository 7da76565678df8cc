"""Callers of `make overload`, in a process of their own: a job as JSON on stdin, what became of each request on stdout.

open loop     arrivals of a Poisson process with a seed, whatever becomes of those before
closed loop   so many callers, each asks again once it was answered

Callers are of three kinds. "once": takes what its Router says. "polite": waits as it was told, and asks the other
Router where one was lost, by the SDK's own rules. "naive": sends again at once, on any failure before output, up to
five times.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.client.connect import OPTIONS
from headrace.control.client_retry import AttemptFailure, RetryPolicy, decide_retry
from headrace.rpc import status

POLITE = RetryPolicy()
NAIVE_MORE = 5
CHANNELS = 2
"""To each Router."""
HANG_S = 5.0
"""After its deadline a call without a status counts as hung."""
PRIORITIES = ((0.1, pb.PRIORITY_CRITICAL), (0.6, pb.PRIORITY_STANDARD), (0.2, pb.PRIORITY_BATCH),
              (0.1, pb.PRIORITY_SHEDDABLE))  # fmt: skip
TENANTS = ((0.3, "one"), (0.3, "two"), (0.3, "three"), (0.1, "narrow"))


@dataclass
class Job:
    """What to do."""

    routers: list[str]
    model: str
    tokens: int
    deadline_s: float
    seconds: float
    seed: int = 1
    rate: float = 0.0
    """Requests a second of the open loop; 0: the closed loop."""
    callers: int = 0
    kind: str = "once"
    """Of the callers."""
    tenant_key: str = "x-tenant"


@dataclass
class Call:
    """One call of a request."""

    took_ms: float = 0.0
    """From its start to its status."""
    said: str = ""
    """Reason and stage of the status; "OK"; or the code of a transport's own."""
    events: int = 0
    ttft_ms: float | None = None


@dataclass
class Request:
    """One request, and all calls that were made for it."""

    at: float
    """Of its arrival, seconds from the start."""
    priority: int
    tenant: str
    calls: list[Call] = field(default_factory=list)
    took_s: float = 0.0
    """From its arrival to its end."""
    end: str = ""
    """Of the terminal event with its reason; "refused: ...", "lost: ..." or "hung"."""
    terminals: int = 0
    """Terminal events, over all calls."""
    tokens: int = 0
    broken: str = ""
    """What the stream of its last call has broken of the contract."""


class Generator:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._chance = random.Random(job.seed)
        self._jitter = random.Random(job.seed + 1)
        self._stubs: list[list[InferenceServiceStub]] = []
        self._turn = itertools.count()
        self.requests: list[Request] = []
        self.lags_ms: list[float] = []
        self._began = 0.0

    async def run(self) -> dict[str, Any]:
        """All of it; returns what is printed."""
        channels = [
            [
                grpc.aio.insecure_channel(router, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
                for _ in range(CHANNELS)
            ]
            for router in self.job.routers
        ]
        self._stubs = [[InferenceServiceStub(channel) for channel in two] for two in channels]
        for two in channels:
            for channel in two:
                await asyncio.wait_for(channel.channel_ready(), 10)
        gc.freeze()
        watching = asyncio.create_task(self._watch())
        self._began = time.perf_counter()
        cpu = time.process_time()
        await (self._open() if self.job.rate else self._closed())
        cpu = (time.process_time() - cpu) / (time.perf_counter() - self._began)
        watching.cancel()
        for two in channels:
            for channel in two:
                await channel.close()
        return {"requests": [asdict(request) for request in self.requests], "lags_ms": self.lags_ms, "cpu": cpu}

    async def _open(self) -> None:
        at, tasks = 0.0, []
        while (at := at + self._chance.expovariate(self.job.rate)) < self.job.seconds:
            request = self._make(at)
            wait_s = at - (time.perf_counter() - self._began)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._ask(request)))
        await asyncio.gather(*tasks)

    async def _closed(self) -> None:
        async def caller() -> None:
            while (now := time.perf_counter() - self._began) < self.job.seconds:
                await self._ask(self._make(now))

        await asyncio.gather(*(caller() for _ in range(self.job.callers)))

    def _make(self, at: float) -> Request:
        tenant = self._chance.choices([t for _, t in TENANTS], [w for w, _ in TENANTS])[0]
        priority = self._chance.choices([p for _, p in PRIORITIES], [w for w, _ in PRIORITIES])[0]
        if not self.job.rate:
            tenant, priority = "one", pb.PRIORITY_STANDARD
        request = Request(at, int(priority), tenant)
        self.requests.append(request)
        return request

    async def _ask(self, request: Request) -> None:
        job, number = self.job, next(self._turn)
        message = pb.GenerateRequest(
            model=job.model, prompt=f"overload {job.seed} {number}", max_tokens=job.tokens,
            priority=request.priority, stop={"ignore_eos": True},
        )  # fmt: skip
        began = time.perf_counter()
        ends = began + job.deadline_s
        router = number % len(self._stubs)
        while True:
            stub = self._stubs[router][number // 2 % CHANNELS]
            failure = await self._call(stub, message, request, ends - time.perf_counter())
            if failure is None:
                break
            wait_s = self._wait_s(request, failure, ends - time.perf_counter())
            if wait_s is None:
                break
            if failure.reason is None or job.kind == "naive":
                router = (router + 1) % len(self._stubs)
            await asyncio.sleep(wait_s)
        request.took_s = time.perf_counter() - began

    def _wait_s(self, request: Request, failure: AttemptFailure, remaining_s: float) -> float | None:
        calls = len(request.calls)
        if self.job.kind == "once":
            return None
        if self.job.kind == "naive":
            return 0.0 if calls <= NAIVE_MORE and not failure.begun and remaining_s > 0 else None
        return decide_retry(POLITE, failure, attempts=calls, remaining_s=remaining_s, jitter=self._jitter.random())

    async def _call(
        self, stub: InferenceServiceStub, message: pb.GenerateRequest, request: Request, remaining_s: float
    ) -> AttemptFailure | None:
        """One call to its end; returns how it failed, unless it did not."""
        made = Call()
        request.calls.append(made)
        request.terminals, request.tokens, request.broken = 0, 0, ""
        began = time.perf_counter()
        call = stub.Generate(
            message, timeout=max(0.001, remaining_s), metadata=((self.job.tenant_key, request.tenant),)
        )
        try:
            async with asyncio.timeout(remaining_s + HANG_S):
                async for event in call:
                    self._take(event, request, made, began)
        except TimeoutError:
            call.cancel()
            made.said = request.end = "hung"
            return None
        except grpc.aio.AioRpcError as error:
            made.took_ms = 1000 * (time.perf_counter() - began)
            return self._failed(error, request, made)
        made.took_ms = 1000 * (time.perf_counter() - began)
        made.said = "OK"
        if request.terminals != 1:
            request.broken = f"{request.terminals} terminal events and an OK"
        return None

    def _take(self, event: pb.GenerateEvent, request: Request, made: Call, began: float) -> None:
        made.events += 1
        if request.terminals:
            request.broken = "an event behind the terminal one"
        if event.sequence != made.events:
            request.broken = f"sequence {event.sequence} as event {made.events}"
        kind = event.WhichOneof("event")
        if kind == "delta":
            if made.ttft_ms is None:
                made.ttft_ms = 1000 * (time.perf_counter() - began)
            request.tokens += len(event.delta.token_ids)
        elif kind == "terminal":
            request.terminals += 1
            request.end = pb.FinishReason.Name(event.terminal.finish_reason).removeprefix("FINISH_REASON_")
            if event.terminal.HasField("error"):
                request.end += f" {status.from_proto(event.terminal.error).reason.value}"

    def _failed(self, error: grpc.aio.AioRpcError, request: Request, made: Call) -> AttemptFailure:
        found = status.from_rpc_error(error)
        if found is None:
            made.said = error.code().name
        else:
            stage = found.metadata.get("bound") or found.metadata.get("quota") or found.metadata.get("stage")
            made.said = found.reason.value + (f" {stage}" if stage else "")
        if not request.terminals:
            request.end = f"{'refused' if not made.events and found is not None else 'lost'}: {made.said}"
        pushback = next((str(value) for key, value in error.trailing_metadata() or () if key == status.PUSHBACK), None)
        return AttemptFailure(
            code=error.code().name,
            reason=found.reason if found is not None else None,
            begun=made.events > 0,
            output=request.tokens > 0,
            retry_after_s=found.retry_after_s if found is not None else None,
            pushback=pushback,
        )

    async def _watch(self) -> None:
        """How late this process itself is: what it adds to the times that it measures."""
        while True:
            at = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            self.lags_ms.append(1000 * (time.perf_counter() - at))


def main() -> None:
    """Read the job, do it, print."""
    job = Job(**json.load(sys.stdin))
    json.dump(asyncio.run(Generator(job).run()), sys.stdout)


if __name__ == "__main__":
    main()
