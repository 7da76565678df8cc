"""One worker: the task that owns its lifecycle, feeds it events and carries out the effects that come back.

The decisions are in headrace.control.worker_lifecycle; each state here has one method that waits for what can
happen in it and returns the event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.adapters.route_codec import replica_to_proto
from headrace.control.attempt_book import WorkerBook
from headrace.control.resources import FailureDomain, Replica, Revision
from headrace.control.worker_health import Signals, worker_signals
from headrace.control.worker_lifecycle import WorkerEffect, WorkerEvent, WorkerLifecycle, WorkerState
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger
from headrace.scheduler.engine_run import EngineRun, Files, Machine
from headrace.scheduler.publisher import Records, ReplicaPublisher
from headrace.scheduler.relay import Relay
from headrace.triton.event_stream import EngineLost

CUT_S = 5.0
"""Time that the engine gets to confirm the end of attempts that a drain cuts off."""
RECYCLE_GRACE_S = 10.0
"""Time that attempts get to finish in a worker that takes too much memory."""
MEMORY_LOOK_S = 1.0
MEMORY_HARD = 1.25
"""A worker that grows to so many times its limit while it is recycled is not waited for."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker may take."""

    start_s: float
    """To verify, start and load."""
    warm_up_s: float
    """To run its shapes."""
    memory_bytes: int = 0
    """Memory for good; 0: no limit."""


@dataclass(slots=True)
class Identity:
    """What every replica of this Scheduler says of itself."""

    scheduler: str
    failure_domain: FailureDomain
    endpoint: str = ""
    """host:port; known once the server listens, before any worker starts."""


class Worker:
    """One engine, started again for as long as it is wanted.

    Args:
        name: the replica, "replicas/{r}".
        revision: what it serves; None for an attached Triton, whose hello tells.
        files: looks the revision's artifacts up, each time it is loaded: their locations may have changed.
        target: host:port of a Triton that runs already; "" to start one.
        gpus: what it may use, and nobody else, until it is over.
    """

    def __init__(
        self,
        name: str,
        *,
        revision: Revision | None,
        files: Callable[[], Files],
        target: str,
        identity: Identity,
        machine: Machine,
        relay: Relay,
        records: Records,
        limits: WorkerLimits,
        gpus: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.life = WorkerLifecycle()
        self.hello: Any = {}
        self.revision = revision.name if revision is not None else ""
        self._revision = revision
        self._files = files
        self._gpus = gpus
        self._target = target
        self._identity = identity
        self._machine = machine
        self._relay = relay
        self._limits = limits
        self._run: EngineRun | None = None
        self._epoch = 0
        self._drain_grace_s: float | None = None
        self._drain_asked = asyncio.Event()
        self._fenced = asyncio.Event()
        self._publisher = ReplicaPublisher(records, name, on_epoch=self.on_epoch, on_fenced=self._fenced.set)
        self._log = get_logger().bind(replica=name, revision=self.revision)

    @property
    def pid(self) -> int:
        """Process id of its tritonserver; 0 when it has none of its own."""
        return self._run.pid if self._run is not None else 0

    @property
    def is_ending(self) -> bool:
        """Whether it was told to stop for good."""
        return self._drain_asked.is_set()

    @property
    def heard_ago_s(self) -> float | None:
        """Seconds since its engine's loop was heard; None where there is none."""
        run = self._run  # metrics are read in another thread
        return run.heard_ago_s if run is not None else None

    @property
    def signals(self) -> Signals:
        """Startup, liveness and readiness, as of now."""
        return worker_signals(self.life, is_registered=self._epoch > 0, heard_ago_s=self.heard_ago_s)

    def memory_bytes(self) -> int:
        """Memory that its processes hold for good; 0 where it has none of its own. Reads /proc."""
        run = self._run
        return run.memory_bytes() if run is not None else 0

    def drain(self, grace_s: float) -> None:
        """Take nothing new, finish what runs within `grace_s` seconds, and stop for good."""
        self._drain_grace_s = grace_s
        self._drain_asked.set()

    def on_epoch(self, epoch: int) -> None:
        """The replica was registered under this epoch."""
        self._epoch = epoch
        self._relay.ledger.add_epoch(self.name, epoch)

    async def run(self) -> None:
        """Live until it is over."""
        waits: dict[WorkerState, Callable[[], Awaitable[tuple[WorkerEvent, str]]]] = {
            WorkerState.CREATED: self._wait_start,
            WorkerState.FAILED: self._wait_start,
            WorkerState.LOADING: self._load,
            WorkerState.WARMING: self._warm,
            WorkerState.READY: self._serve,
            WorkerState.DRAINING: self._finish,
            WorkerState.RECYCLING: self._recycle,
        }
        try:
            while not self.life.is_over:
                event, detail = await waits[self.life.state]()
                effects = self.life.handle(event, time.monotonic(), detail)
                self._log.info("worker_state", state=self.life.state.value, detail=self.life.detail)
                for effect in effects:
                    await self._act(effect)
        finally:
            # Reached early by a bug, or when the whole service is cut short: leave no process and no promise behind.
            if not self.life.is_over:
                self._relay.close_engine(self.name, drained=self._drain_asked.is_set())
                await self._stop_engine(graceful=False)
                await self._publisher.end()

    # One method for each state: what can happen in it.

    async def _wait_start(self) -> tuple[WorkerEvent, str]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, (self.life.start_at or 0.0) - time.monotonic())):
                await self._drain_asked.wait()
        if self._drain_asked.is_set():
            return WorkerEvent.DRAIN_ASKED, "asked to stop"
        return WorkerEvent.STARTED, ""

    async def _load(self) -> tuple[WorkerEvent, str]:
        assert self._run is not None
        if self._target:
            step = self._run.attach(self._target)
        else:
            assert self._revision is not None
            step = self._run.launch(self._revision, self._files(), self._gpus)
        event = await self._or_drain(step, WorkerEvent.LOADED, self._limits.start_s)
        if event[0] is WorkerEvent.LOADED:
            self.hello = self._run.hello
            self.revision = str(self.hello.get("revision") or "")
        return event

    async def _warm(self) -> tuple[WorkerEvent, str]:
        assert self._run is not None
        if not self.revision:
            return WorkerEvent.LOST, "the engine does not say which revision it serves"
        event = await self._or_drain(self._run.warm_up(), WorkerEvent.WARMED, self._limits.warm_up_s)
        if event[0] is WorkerEvent.WARMED:
            self._open()
        return event

    async def _serve(self) -> tuple[WorkerEvent, str]:
        assert self._run is not None
        watched = {
            asyncio.create_task(self._run.lost(), name=f"lost {self.name}"): "lost",
            asyncio.create_task(self._wait_event(self._drain_asked), name=f"drain {self.name}"): "drain",
            asyncio.create_task(self._wait_event(self._fenced), name=f"fence {self.name}"): "fenced",
            asyncio.create_task(self._outgrown(1.0), name=f"memory {self.name}"): "memory",
        }
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            ends = {watched[task]: task.result() for task in done}
        finally:
            await cancel_and_wait(*watched)
        if "lost" in ends:
            return WorkerEvent.LOST, ends["lost"]
        if "fenced" in ends:
            return WorkerEvent.LOST, "another process has taken over this replica's name; names must be unique"
        if "drain" in ends:
            return WorkerEvent.DRAIN_ASKED, "asked to stop"
        return WorkerEvent.RECYCLE_ASKED, ends["memory"]

    async def _finish(self) -> tuple[WorkerEvent, str]:
        """The drain: let attempts finish, then end the rest, and wait for the engine to confirm."""
        assert self._run is not None
        lost = asyncio.create_task(self._run.lost(), name=f"lost {self.name}")
        return await self._let_finish(self._drain_grace_s or 0.0, "stopped as asked", {lost: WorkerEvent.LOST})

    async def _recycle(self) -> tuple[WorkerEvent, str]:
        """The same for one that has to be started again, unless it is to stop for good or grows on."""
        assert self._run is not None
        watched = {
            asyncio.create_task(
                self._wait_event(self._drain_asked), name=f"drain {self.name}"
            ): WorkerEvent.DRAIN_ASKED,
            asyncio.create_task(self._run.lost(), name=f"lost {self.name}"): WorkerEvent.LOST,
            asyncio.create_task(self._outgrown(MEMORY_HARD), name=f"memory {self.name}"): WorkerEvent.LOST,
        }
        return await self._let_finish(RECYCLE_GRACE_S, self.life.detail, watched)

    async def _let_finish(
        self, grace_s: float, detail: str, watched: dict[asyncio.Task[str], WorkerEvent]
    ) -> tuple[WorkerEvent, str]:
        try:
            for limit_s in (grace_s, CUT_S):
                idle = asyncio.create_task(self._relay.wait_idle(self.name), name=f"idle {self.name}")
                try:
                    await asyncio.wait({*watched, idle}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancel_and_wait(idle)
                for task, event in watched.items():
                    if task.done():
                        return event, task.result()
                if not idle.cancelled():
                    break
                self._relay.cut_engine(self.name)
        finally:
            await cancel_and_wait(*watched)
        return WorkerEvent.DRAINED, detail

    async def _outgrown(self, times: float) -> str:
        """Wait until two looks in a row find more memory than so many times the limit."""
        limit = self._limits.memory_bytes
        if not limit:
            await asyncio.Event().wait()
        over = 0
        while True:
            await asyncio.sleep(MEMORY_LOOK_S)
            used = self.memory_bytes()
            over = over + 1 if used > limit * times else 0
            if over >= 2:
                return f"its processes hold {used >> 20} MiB, more than its limit of {limit >> 20} MiB"

    async def _or_drain(self, step: Any, event: WorkerEvent, limit_s: float) -> tuple[WorkerEvent, str]:
        """Run one step of coming up, within its time, unless a drain is asked for first."""
        stepping: asyncio.Task[str | None] = asyncio.create_task(step, name=f"start {self.name}")
        asked = asyncio.create_task(self._wait_event(self._drain_asked), name=f"drain {self.name}")
        try:
            await asyncio.wait({stepping, asked}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if stepping.done():
                return event, stepping.result() or ""
            if asked.done():
                return WorkerEvent.DRAIN_ASKED, "asked to stop"
            return WorkerEvent.LOST, f"it was not {event.value} within {limit_s:g} s"
        except EngineLost as lost:
            return WorkerEvent.LOST, str(lost)
        finally:
            await cancel_and_wait(stepping, asked)

    @staticmethod
    async def _wait_event(event: asyncio.Event) -> str:
        await event.wait()
        return "asked to stop"

    # Effects.

    async def _act(self, effect: WorkerEffect) -> None:
        if effect is WorkerEffect.LAUNCH:
            self._run = EngineRun(self._machine, self.name, self._relay)
        elif effect is WorkerEffect.PUBLISH:
            self._publish()
        elif effect is WorkerEffect.END_ATTEMPTS:
            self._relay.close_engine(self.name, drained=self.life.is_over)
        elif effect is WorkerEffect.REFUSE_NEW:
            self._relay.ledger.drain_worker(self.name)
        elif effect is WorkerEffect.STOP_ENGINE:
            await self._explain()
            await self._stop_engine(graceful=self.life.is_over)
        elif effect is WorkerEffect.WITHDRAW:
            await self._publisher.end()

    async def _explain(self) -> None:
        """Once the attempts have ended there is time to ask the process itself why it is gone."""
        if self._run is not None and self.life.state is WorkerState.FAILED:
            better = await self._run.reason(self.life.detail)
            self.life.detail = better if not self.life.is_crash_loop else self.life.detail

    async def _stop_engine(self, *, graceful: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.stop(graceful=graceful)

    def _open(self) -> None:
        assert self._run is not None
        assert self._run.client is not None
        book = WorkerBook(
            replica=self.name,
            revision=self.revision,
            epochs=(self._epoch,) if self._epoch else (),
            slots=int(self.hello.get("slots") or 1),
            kv_cells=int(self.hello.get("kv_cells") or 0),
            context_tokens=int(self.hello.get("context_tokens") or 0),
            incarnation=self._run.incarnation,
        )
        self._relay.open_engine(book, self._run.client)

    def _publish(self) -> None:
        state = self.life.replica_state
        if state is None or not self.revision:
            return  # an attached engine that has not said hello yet serves nothing that could be named
        execution = self._revision.execution if self._revision is not None else None
        record = Replica(
            name=self.name,
            revision=self.revision,
            scheduler=self._identity.scheduler,
            endpoint=self._identity.endpoint,
            state=state,
            epoch=0,  # readers take the store's create revision
            slots=int(self.hello.get("slots") or (execution.slots if execution else 0)),
            kv_cells=int(self.hello.get("kv_cells") or (execution.kv_cells if execution else 0)),
            failure_domain=self._identity.failure_domain,
            detail=self.life.detail,
            guided=frozenset(map(str, self.hello.get("guided") or ())),
        )
        value = replica_to_proto(record).SerializeToString()
        if self.life.state is WorkerState.LOADING:
            self._epoch = 0
            self._fenced.clear()
            self._publisher.begin(value)
        else:
            self._publisher.put(value)
