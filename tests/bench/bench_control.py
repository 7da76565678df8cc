"""What a change of the control plane costs, and how soon all readers run it; a real etcd, a real Registry's publisher.

    python tests/bench/bench_control.py [--quick]

spread      from the first write of a publication until a reader has swapped, over 1, 10 and 100 readers, each with a
            store and a watch of its own, spread over a few processes; a small fleet, so that the way is what counts
large       100 models, 10,000 replicas: bytes that one replica's change writes, and what it costs a reader to apply it;
            a reader's first snapshot, and its memory
route       one decision of a Router over 10,000 replicas, of which some are tried, revoked or not reachable
path        all that a Generate costs that Router before it is sent on, gRPC left out: CPU time, by size of the prompt

The machine matters: with few cores, the readers of one machine take turns. The figures go to
build/reports/bench-control.json too. Exit code 1: some aim is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.route_decisions import decisions  # noqa: E402
from bench.router_path import paths  # noqa: E402
from headrace.adapters import shard_codec  # noqa: E402
from headrace.adapters.etcd import EtcdStore  # noqa: E402
from headrace.adapters.etcd_settings import EtcdConfig  # noqa: E402
from headrace.adapters.route_codec import alias_to_proto, replica_to_proto, revision_to_proto  # noqa: E402
from headrace.control.resources import (  # noqa: E402
    Alias,
    AliasTarget,
    Engine,
    Execution,
    Replica,
    ReplicaState,
    Revision,
)
from headrace.registry.catalogue import revision_key  # noqa: E402
from headrace.registry.publisher import Publisher  # noqa: E402
from headrace.runtime.membership import Membership  # noqa: E402
from headrace.runtime.ports import Compare, Put, TxnResult  # noqa: E402
from headrace.runtime.snapshot_follower import ROOT_KEY, SnapshotFollower  # noqa: E402
from headrace.runtime.tasks import cancel_and_wait  # noqa: E402
from support.etcd import etcd_process  # noqa: E402

READERS = (1, 10, 100)
PROCESSES_MAX = 4
MODELS, REPLICAS = 100, 10_000
PREFIX = "/bench"
PACE_S = 0.2

AIMS = {
    "spread_100_p99_ms": 100.0,
    "change_bytes": 64 * 1024.0,
    "change_apply_p99_ms": 20.0,
    "route_p99_us": 50.0,
}

console = Console()


class MeasuredStore(EtcdStore):
    """Notes when each version's publication began, and what it wrote."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self.began: dict[int, float] = {}
        self.written: dict[int, int] = {}
        self._since: float | None = None
        self._bytes = 0

    async def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = (), **options: Any
    ) -> TxnResult:
        """As the store's."""
        if any(put.key.startswith("snapshot/") for put in puts):
            self._since = self._since or time.perf_counter()
            self._bytes += sum(len(put.key) + len(put.value) for put in puts)
        done = await super().txn(compares, puts, deletes, **options)
        root = next((put for put in puts if put.key == ROOT_KEY), None)
        if root is not None and self._since is not None:
            version = shard_codec.parse_root(root.value).version
            self.began[version], self.written[version] = self._since, self._bytes
            self._since, self._bytes = None, 0
        return done


class MeasuredFollower(SnapshotFollower):
    """Notes how long it takes to take over what a delivery brings, and when that was done."""

    def __init__(self, store: EtcdStore) -> None:
        super().__init__(store, shard_codec)
        self.took_s: dict[int, float] = {}
        self.applied_at: dict[int, float] = {}

    def _take(self, data: bytes) -> None:
        began = time.perf_counter()
        super()._take(data)
        if self.current is not None:
            now = time.perf_counter()
            self.applied_at.setdefault(self.current.version, now)
            self.took_s.setdefault(self.current.version, now - began)


# The fleet


def fleet(models: int, replicas: int) -> tuple[list[Revision], list[Alias], list[Replica]]:
    """Models with one revision and one alias each, and replicas spread over them, eight on a host."""
    run = Execution(Engine.SYNTHETIC, 8192, 64, 64 * 8192)
    revisions = [Revision(f"model-{n:03}", "", "", run) for n in range(models)]
    aliases = [Alias(f"aliases/{r.model}", (AliasTarget(r.name, 1),)) for r in revisions]
    made = [
        Replica(
            f"replicas/host-{n // 8:05}-{revisions[n % models].model}-{n:08x}",
            revisions[n % models].name,
            f"schedulers/host-{n // 8:05}",
            f"10.{n // 8 // 256}.{n // 8 % 256}.7:50053",
            ReplicaState.READY,
            0,
            64,
            64 * 8192,
        )
        for n in range(replicas)
    ]
    return revisions, aliases, made


def values(revisions: list[Revision], aliases: list[Alias], replicas: list[Replica]) -> list[Put]:
    """The fleet's records."""
    puts = [Put(revision_key(r.name), revision_to_proto(r).SerializeToString()) for r in revisions]
    puts += [Put(a.name, alias_to_proto(a).SerializeToString()) for a in aliases]
    return puts + [Put(r.name, replica_to_proto(r).SerializeToString()) for r in replicas]


@contextlib.asynccontextmanager
async def published(endpoint: str, prefix: str, models: int, replicas: int) -> AsyncIterator[MeasuredStore]:
    """A store with a fleet in it and a publisher at work."""
    store = MeasuredStore(EtcdConfig((endpoint,), prefix=prefix))
    await store.wait_ready(10)
    puts = values(*fleet(models, replicas))
    for start in range(0, len(puts), 100):
        await store.txn((), puts[start : start + 100])
    async with Membership(store, 60) as membership:
        publisher = Publisher(store, membership, name="bench", soft_age_s=30, hard_age_s=3600)
        task = asyncio.create_task(publisher.run())
        await publisher.settled.wait()
        yield store
        await cancel_and_wait(task)
    await store.aclose()


# Readers in processes of their own


async def read(endpoint: str, prefix: str, count: int) -> None:
    """Follow with `count` readers until stdin ends, then print when each applied what, and what it cost."""
    gc.collect()
    before_kib = _rss_kib()
    followers = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            store = EtcdStore(EtcdConfig((endpoint,), prefix=prefix))
            stack.push_async_callback(store.aclose)
            followers.append(MeasuredFollower(store))
        tasks = [asyncio.create_task(f.run()) for f in followers]
        for follower in followers:
            await follower.wait_for(timeout_s=60)
        after_kib = _rss_kib()
        gc.collect()
        gc.freeze()  # as a Router does: headrace.runtime.garbage
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await cancel_and_wait(*tasks)
    report = {
        "memory_kib": (after_kib - before_kib) / count,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "readers": [{"applied_at": f.applied_at, "took_s": f.took_s} for f in followers],
    }
    print(json.dumps(report), flush=True)


def _rss_kib() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS"))


@contextlib.asynccontextmanager
async def readers(endpoint: str, prefix: str, count: int) -> AsyncIterator[list[dict[str, Any]]]:
    """Readers at work while the block runs; their reports afterwards."""
    processes = min(PROCESSES_MAX, count)
    shares = [count // processes + (n < count % processes) for n in range(processes)]
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--read", endpoint, prefix, str(share),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**26,
        )
        for share in shares
    ]  # fmt: skip
    reports: list[dict[str, Any]] = []
    try:
        for process in running:
            assert process.stdout is not None
            while (line := await process.stdout.readline()) != b"ready\n":
                assert line, "a reader's process has ended"
        yield reports
    finally:
        for process in running:
            out, _ = await process.communicate(b"")  # which closes its stdin
            with contextlib.suppress(IndexError, ValueError):
                reports.append(json.loads(out.splitlines()[-1]))


# What is measured


async def spread(endpoint: str, count: int, rounds: int) -> dict[str, float]:
    """Latency from publication to readers."""
    prefix = f"{PREFIX}-spread-{count}"
    revisions, _, _ = fleet(10, 100)
    async with published(endpoint, prefix, 10, 100) as store:
        async with readers(endpoint, prefix, count) as reports:
            first = max(store.began)
            for n in range(rounds):
                weights = (AliasTarget(revisions[0].name, 2 + n), AliasTarget(revisions[1].name, 1))
                await store.put("aliases/canary", alias_to_proto(Alias("aliases/canary", weights)).SerializeToString())
                await asyncio.sleep(PACE_S)
        versions = [version for version in store.began if version > first]
    seen = [
        1000 * (reader["applied_at"][str(version)] - store.began[version])
        for report in reports
        for reader in report["readers"]
        for version in versions
        if str(version) in reader["applied_at"]
    ]
    assert len(seen) == count * len(versions), f"{len(seen)} of {count * len(versions)} were applied"
    return {"readers": count, "publications": len(versions), **_quantiles(seen, "ms"), "max_ms": max(seen)}


async def large(endpoint: str, rounds: int) -> dict[str, float]:
    """The cost of one replica's change among many."""
    prefix = f"{PREFIX}-large"
    _, _, replicas = fleet(MODELS, REPLICAS)
    async with published(endpoint, prefix, MODELS, REPLICAS) as store:
        whole = max(store.written.values())
        async with readers(endpoint, prefix, 1) as reports:
            first = max(store.began)
            changed: list[float] = []
            for n in range(rounds):
                one = replicas[(n * 997) % REPLICAS]
                draining = Replica(
                    one.name, one.revision, one.scheduler, one.endpoint, ReplicaState.DRAINING, 0, one.slots
                )
                version, began = max(store.began), time.perf_counter()
                await store.put(one.name, replica_to_proto(draining).SerializeToString())
                while max(store.began) == version:
                    await asyncio.sleep(0.005)
                changed.append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(PACE_S)
        versions = [version for version in store.began if version > first]
    (report,) = reports
    took = report["readers"][0]["took_s"]
    applied = [1000 * took[str(version)] for version in versions]
    began_ms = [1000 * (report["readers"][0]["applied_at"][str(v)] - store.began[v]) for v in versions]
    return {
        "models": MODELS,
        "replicas": REPLICAS,
        "whole_bytes": whole,
        "change_bytes": max(store.written[version] for version in versions),
        **{f"change_apply_{name}": value for name, value in _quantiles(applied, "ms").items()},
        **{f"change_spread_{name}": value for name, value in _quantiles(began_ms, "ms").items()},
        **{f"change_publish_{name}": value for name, value in _quantiles(changed, "ms").items()},
        "first_apply_ms": 1000 * took[str(first)],
        "memory_mib": report["memory_kib"] / 1024,
    }


def route(rounds: int) -> dict[str, float]:
    """The cost of one decision: resolve the alias, choose the replica."""
    revisions, _, replicas = fleet(1, REPLICAS)
    took, switched = decisions(revisions[0], replicas, rounds)
    return {"replicas": REPLICAS, "decisions": rounds, "interrupted": switched, **_quantiles(took, "us")}


def _quantiles(samples: list[float], unit: str) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        f"p50_{unit}": statistics.median(ordered),
        f"p99_{unit}": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


async def measure(quick: bool) -> dict[str, Any]:
    """Everything."""
    rounds = 10 if quick else 200  # of fewer the 99th percentile would be the slowest one or two
    with tempfile.TemporaryDirectory() as folder:
        async with etcd_process(Path(folder) / "etcd") as etcd:
            spreads = [await spread(etcd.endpoint, count, rounds) for count in READERS]
            whole = await large(etcd.endpoint, rounds)
    revisions, _, replicas = fleet(1, REPLICAS)
    path = await asyncio.to_thread(paths, revisions[0], replicas, 100 if quick else 2_000)
    return {"spread": spreads, "large": whole, "route": route(2_000 if quick else 50_000), "path": path}


def verdict(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Each aim with what was found."""
    values = {
        "spread_100_p99_ms": found["spread"][-1]["p99_ms"],
        "change_bytes": found["large"]["change_bytes"],
        "change_apply_p99_ms": found["large"]["change_apply_p99_ms"],
        "route_p99_us": found["route"]["p99_us"],
    }
    return {name: (values[name], aim) for name, aim in AIMS.items()}


def show(found: dict[str, Any]) -> None:
    """Print tables."""
    table = Table("readers", "publications", "p50 ms", "p99 ms", "max ms", title="publication to applied")
    for row in found["spread"]:
        table.add_row(
            str(row["readers"]), str(row["publications"]), *(f"{row[k]:.1f}" for k in ("p50_ms", "p99_ms", "max_ms"))
        )
    console.print(table)
    for part in ("large", "route"):
        table = Table("what", "value", title=part)
        for name, value in found[part].items():
            table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}")
        console.print(table)
    table = Table(*(name.removesuffix("_us").replace("_", " ") for name in found["path"][0]), title="path, us")
    for row in found["path"]:
        table.add_row(*(f"{value:,.0f}" for value in row.values()))
    console.print(table)
    table = Table("aim", "found", "below", "met", title="aims")
    for name, (value, aim) in verdict(found).items():
        table.add_row(name, f"{value:,.1f}", f"{aim:,.0f}", "yes" if value < aim else "NO")
    console.print(table)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: does it run?")
    parser.add_argument("--read", nargs=3, metavar=("ENDPOINT", "PREFIX", "COUNT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        asyncio.run(read(args.read[0], args.read[1], int(args.read[2])))
        return 0
    found = asyncio.run(measure(args.quick))
    show(found)
    out = ROOT / "build/reports/bench-control.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**found, "aims": verdict(found)}, indent=2) + "\n")
    return 0 if all(value < aim for value, aim in verdict(found).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
