"""Which workers there are: one for each wanted revision, as the routing snapshot and the settings say.

A revision is wanted while some alias names it and its engine is allowed here. One that is no longer wanted is
drained and stopped; its place is free for another once it is over. Attached Tritons are workers from the start
to the end, whatever they serve.

A worker of a GPU engine gets GPUs for itself, from its start until it is over; a revision that needs more than are free
has no place.

A revision that aliases have left has a worker until its successors are ready somewhere (headrace.control.last_good),
unless its place is needed for one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping

from headrace.control import names
from headrace.control.devices import DevicePool
from headrace.control.resources import Engine, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.rpc import status
from headrace.runtime.telemetry import get_logger
from headrace.scheduler.engine_run import Files, Machine
from headrace.scheduler.gpus import visible_gpus
from headrace.scheduler.publisher import Records
from headrace.scheduler.relay import Relay
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.worker import Identity, Worker, WorkerLimits

REMAKE_S = 5.0
"""Pause before a worker whose task failed by a bug is made anew."""


def wanted_revisions(snapshot: RoutingSnapshot, engines: Iterable[Engine]) -> tuple[Revision, ...]:
    """Revisions that this Scheduler ought to serve, by name."""
    allowed = frozenset(engines)
    return tuple(r for r in snapshot.named_revisions() if r.execution.engine in allowed)


def choose_workers(
    wanted: Iterable[str],
    running: Iterable[str],
    places: int,
    *,
    gpus: Mapping[str, int] | None = None,
    free_gpus: int = 0,
) -> tuple[str, ...]:
    """Which of the wanted revisions get a worker when there are fewer places: those that have one, then by name.

    Args:
        wanted: names of the revisions.
        running: those that have a worker, and its GPUs.
        places: workers that there may be.
        gpus: how many GPUs each needs; those that are not named need none.
        free_gpus: how many nobody has. Who needs more than are left is passed over.
    """
    have, needs = frozenset(running), gpus or {}
    chosen: list[str] = []
    for name in sorted(wanted, key=lambda name: (name not in have, name)):
        needed = 0 if name in have else needs.get(name, 0)
        if len(chosen) < places and needed <= free_gpus:
            chosen.append(name)
            free_gpus -= needed
    return tuple(chosen)


def choose_kept(names: Iterable[str], held: Mapping[str, int], *, places: int, gpus: int) -> tuple[str, ...]:
    """Which revisions that were good last keep their workers, when named ones have none.

    Args:
        names: those that have a worker.
        held: the GPUs that each has; those that are not named have none.
        places: workers that named revisions lack.
        gpus: GPUs that the next of them lacks. None is given up for these in vain.
    """
    order = sorted(names)
    left, gpus = order[places:], gpus - sum(held.get(name, 0) for name in order[:places])
    if sum(held.get(name, 0) for name in left) < gpus:
        return tuple(left)
    for name in tuple(left):
        if gpus > 0 and held.get(name):
            left.remove(name)
            gpus -= held[name]
    return tuple(left)


class Fleet:
    """All workers of one Scheduler. Enter it as a context manager: it owns their tasks."""

    def __init__(
        self, settings: SchedulerSettings, *, identity: Identity, machine: Machine, relay: Relay, records: Records
    ) -> None:
        self.workers: dict[str, Worker] = {}
        """By replica name; those that are over are gone."""
        self.restarts: dict[str, int] = {}
        """Restarts of workers that are over, by revision."""
        self._settings = settings
        self._identity = identity
        self._machine = machine
        self._relay = relay
        self._records = records
        self._snapshot: RoutingSnapshot | None = None
        self._stop = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._unserved: tuple[str, ...] = ()
        self.gpus = DevicePool(settings.gpus or visible_gpus())
        """Who has which; held by replica name."""

    async def __aenter__(self) -> Fleet:
        """Start the attached workers."""
        await self._tasks.__aenter__()
        for number, target in enumerate(self._settings.attach[: self._settings.workers_max], start=1):
            self._start(f"replicas/{self._settings.name[:40]}-attached-{number}", target=target)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Wait for every worker's task; `drain` makes them end."""
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Start what a snapshot wants and drain what it does not."""
        self._snapshot = snapshot
        self._relay.ledger.revoked = frozenset(snapshot.revocation_of)
        self._decide()

    @property
    def has_snapshot(self) -> bool:
        """Whether it knows what it ought to serve."""
        return self._snapshot is not None

    @property
    def is_draining(self) -> bool:
        """Whether every worker was told to stop."""
        return self._stop.is_set()

    def on_epoch(self, key: str, epoch: int) -> None:
        """The lease was lost and a replica registered again: the engine is the same, its epoch is not."""
        worker = self.workers.get(key)
        if worker is not None:
            worker.on_epoch(epoch)

    def drain(self, grace_s: float) -> None:
        """Drain every worker for good and start no other."""
        self._stop.set()
        for worker in self.workers.values():
            worker.drain(grace_s)

    def _decide(self) -> None:
        if self._stop.is_set() or self._snapshot is None:
            return
        snapshot = self._snapshot
        wanted = {r.name: r for r in wanted_revisions(snapshot, map(Engine, self._settings.engines))}
        managed = {w.revision: w for name, w in self.workers.items() if not _is_attached(name)}
        places = self._settings.workers_max - len(self.workers) + sum(1 for r in managed if r in wanted)
        needs = {name: revision.execution.gpus_needed for name, revision in wanted.items()}
        chosen = choose_workers(wanted, managed, max(0, places), gpus=needs, free_gpus=self.gpus.free)
        for name in chosen:
            if name not in managed:
                self._start(self._replica_name(wanted[name]), revision=wanted[name])
        unserved = tuple(sorted(set(wanted) - set(chosen)))
        possible = [name for name in unserved if needs[name] <= self.gpus.count]
        kept = self._keep(
            snapshot,
            {name: worker for name, worker in managed.items() if name not in wanted},
            crowded=len(possible) if len(chosen) >= places else 0,
            gpus_needed=max((needs[name] for name in possible[:1]), default=0),
        )
        for revision, worker in managed.items():
            if revision not in wanted and revision not in kept and not worker.is_ending:
                worker.drain(self._settings.drain_grace_s)
        if unserved != self._unserved:
            self._unserved = unserved
            if unserved:
                get_logger().warning(
                    "revisions_without_a_place",
                    revisions=unserved,
                    workers_max=self._settings.workers_max,
                    gpus_needed={name: needs[name] for name in unserved if needs[name]},
                    gpus=self.gpus.count,
                    gpus_free=self.gpus.free,
                )

    def _keep(
        self, snapshot: RoutingSnapshot, running: Mapping[str, Worker], *, crowded: int, gpus_needed: int
    ) -> tuple[str, ...]:
        """What was good last keeps its worker, or gets one again.

        Args:
            snapshot: the newest.
            running: workers of revisions that no alias names.
            crowded: places that named revisions lack.
            gpus_needed: by the next of them that has no worker.
        """
        last_good = snapshot.last_good_revisions() - {r.name for r in snapshot.named_revisions()}
        engines = frozenset(map(Engine, self._settings.engines))
        free = 0 if crowded or gpus_needed else max(0, self._settings.workers_max - len(self.workers))
        for name in sorted(last_good - running.keys())[:free]:
            revision = snapshot.revision_by_name[name]
            if revision.execution.engine in engines:
                self._start(self._replica_name(revision), revision=revision)
        held = {name: len(self.gpus.held_by(worker.name)) for name, worker in running.items()}
        coming = sum(count for name, count in held.items() if name not in last_good)
        lacking = max(0, gpus_needed - self.gpus.free - coming) if gpus_needed else 0
        return choose_kept(last_good & running.keys(), held, places=crowded, gpus=lacking)

    def _start(self, name: str, *, revision: Revision | None = None, target: str = "") -> None:
        """Start a worker; not one whose GPUs are not free."""
        gpus = self.gpus.take(name, revision.execution.gpus_needed) if revision is not None else ()
        if gpus is None:
            return
        worker = Worker(
            name,
            revision=revision,
            files=lambda: self._files_of(revision),
            target=target,
            gpus=gpus,
            identity=self._identity,
            machine=self._machine,
            relay=self._relay,
            records=self._records,
            limits=WorkerLimits(
                start_s=self._settings.start_deadline_s,
                warm_up_s=self._settings.warm_up_deadline_s,
                memory_bytes=self._settings.worker_memory_mib << 20,
            ),
        )
        self.workers[name] = worker
        self._tasks.create_task(self._own(worker, revision, target), name=f"worker {name}")

    def _files_of(self, revision: Revision | None) -> Files:
        if revision is None or self._snapshot is None:
            return Files()
        known, speculative = self._snapshot.artifact_by_name, revision.execution.speculative
        draft = known.get(speculative.draft_artifact) if speculative is not None else None
        return Files(known.get(revision.artifact), draft)

    async def _own(self, worker: Worker, revision: Revision | None, target: str) -> None:
        """Run a worker to its end. A bug in one worker's task must not take the others with it."""
        pause_s = 0.0
        try:
            await worker.run()
        except Exception as error:
            status.unmapped(error, where=f"worker {worker.name}")
            pause_s = REMAKE_S
        finally:
            self.workers.pop(worker.name, None)
            self.gpus.give_back(worker.name)
            self.restarts[worker.revision] = self.restarts.get(worker.revision, 0) + worker.life.restarts
        if pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
        if target and not self._stop.is_set():
            self._start(worker.name, target=target)
        self._decide()

    def _replica_name(self, revision: Revision) -> str:
        model = names.id_from_text(revision.model)
        return f"replicas/{self._settings.name[:28]}-{model[:24].rstrip('.-')}-{revision.digest[:8]}"


def _is_attached(replica: str) -> bool:
    return "-attached-" in replica
