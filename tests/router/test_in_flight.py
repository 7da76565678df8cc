"""Counted in flight is truly in flight, after any storm: a Router and a Scheduler's relay over real gRPC, with kills.

Engines are scripted; they and the workers die, sessions break, ends are lost on the way, and attempts appear that
nobody asked for. Then everything stands still, and all three must have the same attempts; and at the end none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.attempt_book import WorkerBook
from headrace.control.attempt_log import AttemptCause
from headrace.control.attempts import AttemptLedger
from headrace.control.resources import Alias, AliasTarget, Replica, ReplicaState
from headrace.control.snapshot import RoutingSnapshot
from headrace.engine.contract import StepBatch
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.service import SERIALIZERS, InferenceService
from headrace.router.settings import RouterSettings
from headrace.rpc.server import Server
from headrace.scheduler.relay import Relay
from headrace.scheduler.service import SchedulerService
from headrace.scheduler.session import Session as SchedulerSession
from router.harness import REVISION, until
from support.scripted_engine import admitted, finished

WORKERS = 3
REQUESTS = 150
STEP_S = 0.004


class Engine:
    """One run of an engine: admits what it is given, and makes a token of some of it in each step."""

    is_local = True

    def __init__(self, world: World, replica: str, incarnation: int) -> None:
        self.world, self.replica, self.incarnation = world, replica, incarnation
        self.running: dict[int, int] = {}
        """Tokens made, by attempt."""
        self.is_dead = False

    def generate(self, request: dict[str, Any], tokens: Any, **_limits: Any) -> None:
        self.running[request["seq"]] = -1

    def credit(self, seq: int, limit: int) -> None:
        pass

    def cancel(self, seqs: Any, reason: str = "cancelled") -> None:
        for seq in seqs:
            if self.running.pop(seq, None) is not None:
                asyncio.get_running_loop().call_soon(self._tell, [finished(seq, "cancelled")])

    def list_sequences(self) -> None:
        pass

    def condemn(self, why: str) -> None:
        raise AssertionError(why)

    def step(self) -> None:
        rng, events, seqs = self.world.rng, [], []
        for seq, made in list(self.running.items()):
            if rng.random() < 0.6:  # it waits
                continue
            if made < 0:
                events.append(admitted(seq))
            elif made < 6:
                seqs.append(seq)
            elif not self.world.is_frozen:
                del self.running[seq]
                events.append(finished(seq, "stop", emitted=made))
                continue
            self.running[seq] = min(made + 1, 6)
        count = len(seqs)
        columns = {"token_counts": [1] * count, "token_ids": [1] * count, "text_lengths": [1] * count}
        self._tell(events, seqs=seqs, text=b"x" * count, **columns)

    def _tell(self, events: list[dict[str, Any]], **columns: Any) -> None:
        if not self.is_dead:
            batch = StepBatch(number=1, steps=1, events=events, **columns)
            self.world.relay.on_batch(self.replica, self.incarnation, batch)


class World:
    """The Scheduler's side, and what befalls it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.relay = Relay(AttemptLedger())
        self.engines: dict[str, Engine] = {}
        self.is_frozen = False
        """Nothing ends, so that one can compare."""
        self.counts: Counter[str] = Counter()
        self._incarnations = itertools.count(1)

    def start_worker(self, number: int) -> None:
        replica = f"replicas/r{number}"
        engine = Engine(self, replica, next(self._incarnations))
        book = WorkerBook(
            replica, REVISION.name, (40 + number,), slots=8, kv_cells=10_000, context_tokens=64,
            incarnation=engine.incarnation,
        )  # fmt: skip
        self.engines[replica] = engine
        self.relay.open_engine(book, engine)  # type: ignore[arg-type]

    def kill_worker(self, number: int) -> None:
        replica = f"replicas/r{number}"
        self.engines[replica].is_dead = True
        self.relay.close_engine(replica, drained=False)
        self.start_worker(number)
        self.counts["kill"] += 1

    def break_sessions(self) -> None:
        for session in self.relay.sessions.values():
            session._overflown = True
            session._wanted.set()
            self.counts["break"] += 1

    def stray(self) -> None:
        """An attempt that no Router knows, in a session of one."""
        for session in self.relay.sessions.values():
            message = sp.Dispatch(
                attempt=self.rng.getrandbits(60) + 1, request="requests/stray", revision=REVISION.name,
                replica="replicas/r0", epoch=40, credit_limit=64, output_tokens_max=16,
                generate=pb.GenerateRequest(prompt="stray"),
            )  # fmt: skip
            self.relay.take(session, sp.AttachRequest(dispatches=[message]))
            self.counts["stray"] += 1

    async def live(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for engine in list(self.engines.values()):
                engine.step()

    @property
    def there(self) -> set[int]:
        return set(self.relay.ledger.attempts)

    @property
    def computed(self) -> set[int]:
        return {seq for engine in self.engines.values() for seq in engine.running}


@contextlib.asynccontextmanager
async def storm(seed: int) -> AsyncIterator[tuple[World, Routes, InferenceService, Any]]:
    world = World(seed)
    peer = Server("127.0.0.1:0")
    nothing: Any = None
    peer.add(
        sp.DESCRIPTOR.services_by_name["SchedulerService"],
        SchedulerService("schedulers/test", "1", world.relay, nothing, nothing),
    )
    await peer.start()
    for number in range(WORKERS):
        world.start_worker(number)
    routes = Routes(router="routers/test", incarnation="1")
    replicas = tuple(
        Replica(f"replicas/r{n}", REVISION.name, "schedulers/test", peer.endpoint, ReplicaState.READY, 40 + n, 8)
        for n in range(WORKERS)
    )
    alias = Alias("aliases/chat", (AliasTarget(REVISION.name, 1),))
    routes.apply(RoutingSnapshot("here", 5, revisions=(REVISION,), aliases=(alias,), replicas=replicas))
    settings = RouterSettings(listen="127.0.0.1:0", hedge_after_s=0.02, retry_floor=10_000)
    service = InferenceService(settings, routes, RouterMetrics())
    server = Server("127.0.0.1:0")
    server.add(pb.DESCRIPTOR.services_by_name["InferenceService"], service, serializers=SERIALIZERS)
    await server.start()
    living = [asyncio.create_task(world.live()), asyncio.create_task(_tend(service, routes))]
    try:
        await until(lambda: routes.links[0].is_up)
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            yield world, routes, service, InferenceServiceStub(channel)
    finally:
        for task in living:
            task.cancel()
        await routes.close()
        await server.stop(0)
        await peer.stop(0)


async def _tend(service: InferenceService, routes: Routes) -> None:
    while True:
        service.tend()
        await asyncio.sleep(0.02)


async def _one(stub: Any, patience: int, ends: Counter[str]) -> None:
    """One call, that its client leaves after so many events."""
    call = stub.Generate(pb.GenerateRequest(model="chat", prompt="hello", max_tokens=16), timeout=8)
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            patience -= 1
            if patience < 0:
                call.cancel()
            if event.HasField("terminal"):
                ends[pb.FinishReason.Name(event.terminal.finish_reason)] += 1
    except (grpc.RpcError, asyncio.CancelledError) as error:
        ends[error.code().name if isinstance(error, grpc.RpcError) else "CANCELLED"] += 1


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_storm_router_scheduler_and_engines_have_the_same_attempts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ended = SchedulerSession.put_ended
    async with storm(seed) as (world, routes, service, stub):
        rng, ends = world.rng, Counter[str]()

        def lossy(session: SchedulerSession, message: sp.Ended) -> None:
            if rng.random() < 0.1:
                world.counts["end lost"] += 1
            else:
                put_ended(session, message)

        monkeypatch.setattr(SchedulerSession, "put_ended", lossy)
        calls = []
        for number in range(REQUESTS):
            calls.append(asyncio.create_task(_one(stub, rng.choice([0, 1, 3, 99, 99, 99]), ends)))
            await asyncio.sleep(3 * STEP_S)
            if number % 30 == 29:
                world.kill_worker(rng.randrange(WORKERS))
            if number in (20, 60):
                world.break_sessions()
            if number % 20 == 19:
                world.stray()
        monkeypatch.undo()
        world.is_frozen = True
        (link,) = routes.links
        await until(lambda: link.is_up)
        more = [asyncio.create_task(_one(stub, 99, ends)) for _ in range(8)]
        world.stray()
        await until(lambda: len(world.computed) >= 4)

        def all_agree() -> bool:
            link.ask_inventory()
            return set(link._owners) == world.there == world.computed

        await until(all_agree, "the same attempts everywhere")
        assert world.there, "there is something to compare"
        assert sum(routes.in_flight.values()) == len(world.there), "what places are chosen by"
        world.is_frozen = False
        await until(lambda: all(call.done() for call in calls + more))
        await until(lambda: all_agree() and not world.there)
        await until(lambda: not list(service.sessions))
        assert service.sessions.resources.references == 0
        assert not any(routes.in_flight.values())
        assert min(world.counts[what] for what in ("kill", "break", "stray", "end lost")) > 0, world.counts
        assert link.inventory.lost > 0
        assert link.inventory.unknown > 0
        assert ends["FINISH_REASON_STOP"] > REQUESTS / 5, ends


async def test_a_scheduler_counts_successes_and_extra_attempts_for_the_budget_of_all_routers() -> None:
    async with storm(3) as (world, _routes, service, stub):
        retrying, ends = service.sessions.retrying, Counter[str]()
        retrying.hedge_after_s = 0.0
        await asyncio.gather(*(_one(stub, 99, ends) for _ in range(20)))
        assert ends == {"FINISH_REASON_STOP": 20}
        lost = [asyncio.create_task(_one(stub, 99, ends)) for _ in range(12)]
        await until(lambda: len(world.there) == 12)
        for number in range(WORKERS):
            world.kill_worker(number)
        await asyncio.gather(*lost)
        made = retrying.attempts[AttemptCause.RETRY]
        assert made > 0

        def reported() -> tuple[int, ...]:
            world.relay.ask_loads()
            return tuple((one.successes, one.extra_attempts, one.routers) for one in retrying.budget._reports.values())

        first = sum(1 for one in ends.elements() if one == "FINISH_REASON_STOP") - made
        await until(lambda: reported() == ((first, made, 1),), "what the Scheduler tells")
        left = pytest.approx(10_000 + 0.1 * first - made)
        await until(lambda: bool(reported()) and retrying.budget.balance(time.monotonic()) == left, "none counts twice")
