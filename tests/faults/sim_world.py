"""Registries, followers and a twin over the simulated etcd, a script of faults by a seed, and the laws.

Real code: Publisher, Membership, ServiceReport, SnapshotFollower, PrefixWatch and WatchCursor, check_successor, the
codecs. Simulated: etcd, the network, time.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

from faults.readers import Twin, Versions
from faults.sim_loop import VirtualLoop
from faults.sim_store import BrokenLaw, Link, SimEtcd
from headrace.adapters import route_codec, shard_codec
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Failure
from headrace.control.resources import Engine, Execution, Revision
from headrace.registry.catalogue import revision_key
from headrace.registry.publisher import Publisher
from headrace.runtime.membership import Membership
from headrace.runtime.ports import KeyValue, Put
from headrace.runtime.service_report import ServiceReport
from headrace.runtime.snapshot_follower import ROOT_KEY, SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait

SECONDS = 14.0
SETTLE_S = 60.0
TTL_S = 5
ALIASES = 3
REVISION = Revision("m", "", "", Execution(Engine.SYNTHETIC, 128, 1, 128))


class Follower:
    """A Router or Scheduler, as far as snapshots go."""

    def __init__(self, server: SimEtcd, name: str) -> None:
        self.link = Link(server, name)
        self.membership = Membership(self.link, TTL_S, clock=server.loop.time)
        self.follower = SnapshotFollower(self.link, shard_codec, clock=server.loop.time)
        self.versions = Versions(name)
        self.follower.subscribe(lambda s: self.versions.note(s.version, s.digest, s.incarnation))
        self.report = ServiceReport(self.membership, self.follower, name=f"routers/{name}", endpoint="127.0.0.1:1")

    async def run(self) -> None:
        """Follow and report, for ever."""
        while True:
            try:
                async with self.membership, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.follower.run())
                    tasks.create_task(self.report.run())
            except Failure:  # no lease yet: the real one fails its start, and is started again
                await asyncio.sleep(0.5)


class Registry:
    """One that may be killed and started again; each life has a link of its own."""

    def __init__(self, server: SimEtcd, name: str) -> None:
        self._server = server
        self.name = name
        self.start()

    def start(self) -> None:
        """Begin a life."""
        self.link = Link(self._server, self.name)
        self.task = asyncio.create_task(self._run(self.link))

    async def kill(self) -> None:
        """End it; what it has sent may still arrive."""
        self.link.cut()
        self.link.state = "dead"
        self.task.cancel()
        _, still = await asyncio.wait([self.task], timeout=30.0)
        if still:
            raise BrokenLaw(f"{self.name} does not end when it is cancelled")

    async def _run(self, link: Link) -> None:
        clock = self._server.loop.time
        while True:
            try:
                async with Membership(link, TTL_S, clock=clock) as membership:
                    self.publisher = Publisher(
                        link, membership, name=self.name, soft_age_s=30.0, hard_age_s=60.0, clock=clock
                    )
                    await self.publisher.run()
            except Failure:
                await asyncio.sleep(0.5)


class World:
    """One run."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server = SimEtcd(loop, self.rng)
        self.loop = loop
        self.weights = dict.fromkeys((f"a{n}" for n in range(ALIASES)), 0)
        self.registries = [Registry(self.server, f"g{n}") for n in range(self.rng.randint(1, 3))]
        self.followers = [Follower(self.server, f"r{n}") for n in range(2)]
        self.twin_link = Link(self.server, "twin")
        self.twin = Twin(self.twin_link, prefix="aliases/", check=self._check_view)  # type: ignore[arg-type]
        self.loses_events = self.rng.random() < 0.5
        """Whether single events vanish; between that and its next write a key may be wrong."""
        self.saved: tuple[Any, ...] | None = None
        self.promised: list[tuple[str, int]] = []
        self.acts: list[str] = []

    def write(self, alias: str) -> None:
        """What an administrator does, at the server itself; after a wipe the revision too."""
        puts = []
        key = revision_key(REVISION.name)
        if key not in self.server.items:
            puts.append(Put(key, route_codec.revision_to_proto(REVISION).SerializeToString()))
        self.weights[alias] += 1
        target = resources_pb2.AliasTarget(revision=REVISION.name, weight=self.weights[alias])
        message = resources_pb2.Alias(name=f"aliases/{alias}", targets=[target])
        puts.append(Put(message.name, message.SerializeToString()))
        revision = self.server.write(puts, (), None)
        self.promised.append((message.name, revision))

    def _check_view(self, incarnation: str, revision: int, view: dict[str, bytes]) -> None:
        """After every hand-over a reader has what the store had at that revision."""
        if not self.loses_events and view != self.server.views.get((incarnation, revision)):
            self.twin.broken.append(f"at revision {revision} the twin is not what the store was")

    def links(self) -> list[Link]:
        """All that can break."""
        return [*(r.link for r in self.registries), *(f.link for f in self.followers), self.twin_link]

    async def run(self) -> None:
        """The script, the calm after it, and the laws."""
        tasks = self.tasks = [asyncio.create_task(self.server.run()), asyncio.create_task(self.twin.watch.run())]
        tasks += [asyncio.create_task(follower.run()) for follower in self.followers]
        try:
            for alias in self.weights:
                self.write(alias)
            while self.loop.time() < SECONDS:
                await asyncio.sleep(self.rng.expovariate(5.0))
                await self._act()
            await self._calm()
            await self._settle()
        finally:
            await cancel_and_wait(*tasks, *(registry.task for registry in self.registries))

    async def _act(self) -> None:
        acts = (
            "write",
            "hold",
            "lose",
            "cut",
            "late",
            "drop",
            "repeat",
            "compact",
            "kill",
            "freeze",
            "wipe",
            "save",
            "restore",
        )
        act = self.rng.choices(acts, (60, 6, 4, 6, 4, 4, 5, 4, 4, 1, 0.4, 3, 0.6))[0]
        link = self.rng.choice([*self.links(), self.twin_link])
        self.acts.append(f"{self.loop.time():.3f} {act} {link.name}")
        if act == "write":
            for _ in range(self.rng.choice((1, 1, 3))):
                self.write(self.rng.choice(list(self.weights)))
        elif act in ("hold", "lose"):
            link.state = (
                "held" if act == "hold" and link.state != "dead" else "lost" if link.state != "dead" else "dead"
            )
            self.loop.call_later(self.rng.uniform(0.2, 7.0), link.heal)
        elif act == "cut":
            link.cut()
        elif act == "late":
            link.late = self.rng.choice((0.0, 0.1, 0.3))
        elif act in ("drop", "repeat"):
            for stream in link.streams:
                stream.drops += act == "drop" and self.loses_events
                stream.repeats += act == "repeat"
        elif act == "compact":
            self.server.compact(self.rng.choice((self.server.revision, self.rng.randint(1, self.server.revision))))
        elif act == "kill":
            registry = self.rng.choice(self.registries)
            await registry.kill()
            await asyncio.sleep(self.rng.uniform(0.0, 2.0))
            registry.start()
        elif act == "freeze":
            self.server.frozen_until = self.loop.time() + self.rng.uniform(1.0, 2.0 * TTL_S)
        elif act == "wipe":
            self._wipe()
        elif act == "save":
            self.saved = self.server.backup()
        elif act == "restore" and self.saved is not None:
            self.server.restore(self.saved)
            self.promised.clear()

    def _wipe(self) -> None:
        self.server.wipe()
        self.saved = None
        self.promised.clear()
        for alias in self.weights:
            self.write(alias)

    async def _calm(self) -> None:
        """Heal everything, and write every key again so that a lost event shows."""
        self.server.frozen_until = 0.0
        for link in self.links():
            link.late = 0.0
            link.heal()
            for stream in link.streams:
                stream.drops = stream.repeats = 0
        await asyncio.sleep(8.0)  # what is late has arrived, and every partition is over
        for _ in range(2):
            for alias in self.weights:
                self.write(alias)
            await asyncio.sleep(0.5)

    async def _settle(self) -> None:
        deadline = self.loop.time() + SETTLE_S
        while missing := self._missing():
            if self.loop.time() > deadline:
                raise BrokenLaw(f"no convergence: {missing}")
            await asyncio.sleep(0.5)
        broken = [text for follower in self.followers for text in follower.versions.broken] + self.twin.broken
        lost = self.twin.lost(self.promised)
        if broken or lost:
            raise BrokenLaw(f"{broken[:3]} lost {lost[:3]}")

    def _missing(self) -> list[str]:
        stored = {key: kv.value for key, kv in self.server.items.items() if key.startswith("aliases/")}
        missing = [] if self.twin.view == stored else ["the twin differs"]
        running = [*self.tasks, *(registry.task for registry in self.registries)]
        missing += [f"ended by {_leaf(task.exception())!r}" for task in running if task.done()]
        root: KeyValue | None = self.server.items.get(ROOT_KEY)
        if root is None:
            return ["nothing is published"]
        wanted = shard_codec.parse_root(root.value)
        for follower in self.followers:
            have = follower.follower.current
            if have is None or (have.version, have.digest) != (wanted.version, wanted.digest):
                missing.append(f"{follower.versions.name}: {have and have.version}, not {wanted.version}")
                continue
            shown = {alias.name.partition("/")[2]: alias.targets[0].weight for alias in have.aliases}
            if shown != self.weights:
                missing.append(f"{follower.versions.name} shows {shown}, not {self.weights}")
        return missing

    def trace(self) -> str:
        """What happened, as a digest: the same for the same seed."""
        told = [sorted(follower.versions.history) for follower in self.followers]
        text = repr((self.acts, told, self.server.revision, self.server.roots_written, self.weights))
        return hashlib.sha256(text.encode()).hexdigest()


def _leaf(error: BaseException | None) -> BaseException | None:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def simulate(seed: int, *, blind_to: str = "") -> World:
    """Run one seed.

    Raises:
        BrokenLaw: says which.
    """
    random.seed(seed)
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def main() -> World:
            world = World(loop, seed)
            world.server.blind_to = blind_to
            failed: list[Any] = []
            loop.set_exception_handler(lambda loop, context: failed.append(context.get("exception") or context))
            await world.run()
            if failed:
                raise BrokenLaw(f"an unhandled error: {failed[0]!r}") from (
                    failed[0] if isinstance(failed[0], BaseException) else None
                )
            return world

        return runner.run(main())
