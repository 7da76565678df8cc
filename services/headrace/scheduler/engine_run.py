"""One run of one engine, from its files to its end: launched here, or attached to where it runs already.

launch()  artifact verified, Triton started, model loaded, hello heard
warm_up() the engine's loop answers and has run every shape that it declares
lost()    resolves when the engine is gone, with the reason
stop()    nothing of it is left

How soon a loss is seen: the end of tritonserver or of its stub within milliseconds, a loop that hangs within
SILENCE_MAX_S and half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.control.resources import Artifact, Revision
from headrace.engine.contract import StepBatch
from headrace.runtime.settings import SettingsError
from headrace.runtime.tasks import cancel_and_wait
from headrace.scheduler.artifacts import ArtifactFault, ArtifactVerifier
from headrace.scheduler.engine_config import engine_config
from headrace.scheduler.warm_up import Declared, WarmUp
from headrace.triton.engine_client import EngineClient
from headrace.triton.event_stream import EngineLost
from headrace.triton.process import TritonPlan, TritonProcess, start_triton
from headrace.triton.runtimes import runtime_name
from headrace.triton.workspace import find_model_repository, prepare_triton

HELLO_S = 10.0
STOP_GRACE_S = 10.0
_EXIT_REASON_S = 0.5

_incarnations = itertools.count(1)


class Carrier(Protocol):
    """Where an engine's output goes: the relay."""

    def on_batch(self, replica: str, incarnation: int, batch: StepBatch) -> None:
        """One response of the event stream."""

    def on_refused(self, incarnation: int, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        """Sequences were refused before the engine began with them."""


@dataclass(slots=True)
class _Sink:
    """Ties a client to the run that it serves, not to a replica's name: the next run has the same one."""

    replica: str
    incarnation: int
    carrier: Carrier
    warming: WarmUp | None = None
    """Hears everything until it is over; nothing else is said of a worker that does not serve."""

    def on_batch(self, batch: StepBatch) -> None:
        if self.warming is not None:
            self.warming.on_batch(batch)
        else:
            self.carrier.on_batch(self.replica, self.incarnation, batch)

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        if self.warming is not None:
            self.warming.on_refused(seqs, error)
        else:
            self.carrier.on_refused(self.incarnation, seqs, error)


@dataclass(frozen=True, slots=True)
class Files:
    """The artifacts that a revision needs."""

    model: Artifact | None = None
    draft: Artifact | None = None
    """What drafts for it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs on this machine share."""

    scheduler: str
    cache_dir: Path
    state_dir: Path
    model_repository: Path | None
    threads: int
    verifier: ArtifactVerifier
    kv_over_commit: float = 1.0
    """KV cells that attempts may be promised, in multiples of what there are."""


class EngineRun:
    """One engine of one worker. Used once."""

    def __init__(self, machine: Machine, replica: str, carrier: Carrier) -> None:
        self.client: EngineClient | None = None
        self.incarnation = next(_incarnations)
        """Differs for each run of any worker of this process."""
        self.hello: Mapping[str, Any] = {}
        self._machine = machine
        self._replica = replica
        self._sink = _Sink(replica, self.incarnation, carrier)
        self._process: TritonProcess | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of its tritonserver; 0 when there is none of ours."""
        return self._process.pid if self._process is not None and not self._process.has_exited else 0

    @property
    def heard_ago_s(self) -> float | None:
        """Seconds since the engine's loop was heard; None: its events are not read yet, or no more."""
        if self.client is None or self._reading is None or self._reading.done():
            return None
        return time.monotonic() - self.client.heard_at

    def memory_bytes(self) -> int:
        """Memory that its processes hold for good; 0: none of ours."""
        return self._process.memory_bytes() if self._process is not None else 0

    async def launch(self, revision: Revision, files: Files, gpus: Sequence[str] = ()) -> None:
        """Verify the artifacts, start Triton, and wait until the engine says hello.

        Args:
            revision: what it serves.
            files: the artifacts that it needs.
            gpus: what it may use, and nobody else; as CUDA_VISIBLE_DEVICES names them.

        Raises:
            EngineLost: why it did not come up, one sentence.
        """
        have = runtime_name(revision.execution.engine)
        if revision.runtime not in ("", have):
            raise EngineLost(f"{revision.name} was made for {revision.runtime}; this Scheduler has {have}")
        try:
            for artifact in (files.model, files.draft):
                if artifact is not None:
                    await self._machine.verifier.verify(artifact)
            plan = await asyncio.to_thread(self._plan, revision, files, gpus)
            self._process = start_triton(plan)
        except (ArtifactFault, SettingsError) as error:
            raise EngineLost(str(error)) from None
        except OSError as error:
            raise EngineLost(f"Triton could not be started: {error.strerror}") from None
        await self._connect(self._process.target)
        said = self.hello.get("revision")
        if said != revision.name:
            raise EngineLost(f"the engine says that it serves {said}, not {revision.name}")

    async def attach(self, target: str) -> None:
        """Take over the engine of a Triton that runs already.

        Raises:
            EngineLost: why it cannot be used.
        """
        await self._connect(target)

    async def warm_up(self) -> str:
        """Ask the engine's own loop for an answer and run every shape that it declares; returns what was run.

        Raises:
            EngineLost: it did not answer, or a shape failed.
        """
        assert self.client is not None
        declared = Declared.of(self.hello)
        self._reading = asyncio.create_task(self.client.run(), name=f"engine {self._replica}")
        warming = asyncio.create_task(self._warm_up(self.client, declared), name=f"warm up {self._replica}")
        lost = asyncio.create_task(self.lost(), name=f"lost {self._replica}")
        try:
            await asyncio.wait({lost, warming}, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                raise EngineLost(await lost)
            return await warming
        finally:
            await cancel_and_wait(warming, lost)

    async def _warm_up(self, client: EngineClient, declared: Declared | None) -> str:
        await client.ping()
        if declared is None:
            return ""
        self._sink.warming = WarmUp(client, declared)
        client.is_patient = True
        said = await self._sink.warming.run()
        client.is_patient = False
        self._sink.warming = None
        return said

    async def lost(self) -> str:
        """Wait until the engine is gone; returns why, one sentence."""
        assert self._reading is not None
        exit_code = asyncio.create_task(self._exited(), name=f"exit {self._replica}")
        crippled = asyncio.create_task(self._crippled(), name=f"stub {self._replica}")
        try:
            await asyncio.wait({self._reading, exit_code, crippled}, return_when=asyncio.FIRST_COMPLETED)
            if exit_code.done() and not self._reading.done():
                return await exit_code
            if crippled.done() and not self._reading.done():
                return "the engine's own process has ended, and tritonserver does not say so"
            try:
                await self._reading
            except EngineLost as lost:
                return str(lost)
            raise AssertionError("an engine's reader returned")
        finally:
            await cancel_and_wait(exit_code, crippled)

    async def reason(self, said: str) -> str:
        """The better reason, if the process itself has ended within a moment."""
        if self._process is None:
            return said
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_REASON_S):
                return await self._exited()
        return said

    async def stop(self, *, graceful: bool) -> None:
        """End everything of this run: streams, process, shared memory. Safe to call again."""
        if self._reading is not None:
            await cancel_and_wait(self._reading)
        if self.client is not None:
            await self.client.close()
        if self._process is not None:
            if not graceful:
                self._process.kill()
            await self._process.stop(STOP_GRACE_S)

    async def _exited(self) -> str:
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        await self._process.wait_exit()
        return self._process.failure()

    async def _crippled(self) -> None:
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        self._process.watch_children()
        await self._process.wait_crippled()

    async def _connect(self, target: str) -> None:
        self.client = EngineClient(target, owner=self._machine.scheduler, sink=self._sink)
        loading = asyncio.create_task(self.client.wait_loaded(), name=f"load {self._replica}")
        exited = asyncio.create_task(self._exited(), name=f"exit {self._replica}")
        try:
            await asyncio.wait({loading, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise EngineLost(await exited)
            await loading
        finally:
            await cancel_and_wait(loading, exited)
        self.hello = await self.client.open(HELLO_S)

    def _plan(self, revision: Revision, files: Files, gpus: Sequence[str]) -> TritonPlan:
        run = revision.execution
        threads = run.threads or self._machine.threads or default_threads(os.cpu_count() or 1)
        return TritonPlan(
            files=prepare_triton(self._machine.cache_dir),
            model_repository=find_model_repository(self._machine.model_repository),
            engine_config=engine_config(
                revision,
                files.model,
                draft=files.draft,
                gpus=gpus,
                threads=threads,
                incarnation=secrets.token_hex(8),
                kv_over_commit=self._machine.kv_over_commit,
            ),
            directory=self._machine.state_dir / "workers" / self._replica.rpartition("/")[2],
            threads=threads,
        )


def default_threads(cpus: int) -> int:
    """Compute threads on a machine of `cpus` cores: all of a small one, all but one of a larger one.

    Whatever leaves the engine idle on two cores costs half its speed, while Triton, Scheduler and Router together need
    some 2 ms of CPU a step; on more cores, one of them is a small price for keeping those out of the engine's way.
    """
    return cpus if cpus <= 4 else cpus - 1
