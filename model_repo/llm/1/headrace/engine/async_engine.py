"""A managed engine over a library of coroutines: its event loop, its thread, one task for each request.

An adapter derives from `AsyncEngine` and says how its engine opens, generates, aborts and closes. What an engine says
of a request reaches neither log nor caller, because it may quote a prompt: only the class of what was raised is told.
"""

from __future__ import annotations

import abc
import asyncio
import importlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from headrace.engine.backend import ModelFacts
from headrace.engine.config import ConfigError, EngineConfig
from headrace.engine.hf_tokenizer import HfTokenizer
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.peft import check_fit
from headrace.engine.request import Guided, RefusalError, Sampling, invalid
from headrace.engine.schema_reading import BadSchema, parse_schema

HEALTH_EVERY_S = 0.5
ABORT_AGAIN_S = 0.02
ADAPTER = "headrace-adapter"
"""What the revision's one LoRA adapter is called in an engine. Which one it is, the registry says, never a request."""
_CLOSE_S = 30.0


class AsyncEngine(abc.ABC):
    """See `managed.ManagedEngine`. `kind` is the engine's name in a configuration."""

    kind: str

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer = HfTokenizer(Path(config.model_path))
        self._versions: dict[str, str] = {}
        self._guided: frozenset[str] = frozenset()
        """Kinds of guided decoding that it can do; set by `_open`."""
        self._refusals: tuple[type[BaseException], ...] = (ValueError,)
        """What it raises for a request that it does not take."""
        self._stats = ManagedStats()
        self._wake: Callable[[], None] = lambda: None
        self._deltas: list[Delta] = []
        self._lock = threading.Lock()
        self._death: str | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=self.kind, daemon=True)

    @abc.abstractmethod
    async def _open(self) -> None:
        """Imports the library, makes the engine, fills `_versions`. Raises `ConfigError`."""

    @abc.abstractmethod
    def _generate(self, request: ManagedRequest) -> AsyncIterator[Delta]:
        """What becomes of a request; the last delta has an end."""

    @abc.abstractmethod
    async def _abort(self, request_id: str) -> None:
        """Asks the engine for an early end, which `_generate` then tells; asked again while it has not."""

    @abc.abstractmethod
    async def _look(self) -> ManagedStats:
        """What the engine says of itself now; called every half second. Raises `EngineDead`."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Gives everything back, also after an `_open` that failed half-way."""

    def _is_death(self, error: BaseException) -> bool:
        """Whether what a request met is the end of the engine as a whole."""
        return isinstance(error, EngineDead)

    @property
    def facts(self) -> ModelFacts:
        """What the model's folder says."""
        return self._tokenizer.facts(self.kind, self._versions, self._guided)

    def tokenize(self, text: str) -> list[int]:
        """See `HfTokenizer`."""
        return self._tokenizer.tokenize(text)

    def piece(self, token: int) -> bytes:
        """See `HfTokenizer`."""
        return self._tokenizer.piece(token)

    def check(self, sampling: Sampling, top_logprobs: int | None) -> None:
        """What all of them take: the penalties' range is that of OpenAI's API."""
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(sampling, name) <= 2:
                raise invalid(f"sampling.{name}", f"must be between -2 and 2 on {self.kind}")

    def check_guided(self, guided: Guided) -> None:
        """What can be seen without the engine: the rest it says itself, as a refusal."""
        if guided.kind == "json_schema":
            try:
                parse_schema(guided.text)
            except BadSchema as error:
                raise invalid("guided.json_schema", str(error)) from None

    def start(self, wake: Callable[[], None]) -> None:
        """See `ManagedEngine`."""
        self._wake = wake
        self._thread.start()
        try:
            self._call(self._begin()).result()
        except (ConfigError, RefusalError):
            raise
        except Exception as error:
            sys.stderr.write(f"headrace engine: {self.kind} did not start: {type(error).__name__}: {error}\n")
            raise ConfigError(
                f"{self.kind} did not start: {type(error).__name__}; the worker's log has what it said."
            ) from error

    async def _begin(self) -> None:
        if self._config.adapter_path:
            check_fit(self._config.adapter_path, self._config.model_path)
        await self._open()
        self._watch = self._loop.create_task(self._keep_looking())

    def submit(self, request: ManagedRequest) -> None:
        """See `ManagedEngine`."""
        self._loop.call_soon_threadsafe(self._begin_task, request)

    def events(self) -> list[Delta]:
        """See `ManagedEngine`."""
        with self._lock:
            deltas, self._deltas = self._deltas, []
        return deltas

    def cancel(self, request_id: str) -> None:
        """See `ManagedEngine`."""
        self._loop.call_soon_threadsafe(self._begin_abort, request_id)

    def stats(self) -> ManagedStats:
        """See `ManagedEngine`."""
        return self._stats

    def health(self) -> str | None:
        """See `ManagedEngine`."""
        return self._death

    def shutdown(self) -> None:
        """See `ManagedEngine`."""
        if self._thread.ident is None:
            return
        try:
            self._call(self._end()).result(_CLOSE_S)
        except Exception as error:
            sys.stderr.write(f"headrace engine: {self.kind} did not close: {type(error).__name__}\n")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = [*self._aborts, *self._tasks.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _begin_task(self, request: ManagedRequest) -> None:
        task = self._loop.create_task(self._pump(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    def _begin_abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            aborting = self._loop.create_task(self._abort_until_over(request_id, task))
            self._aborts.add(aborting)
            aborting.add_done_callback(self._aborts.discard)

    async def _abort_until_over(self, request_id: str, task: asyncio.Task[None]) -> None:
        """Again and again, ever more slowly: an engine that has not taken the request in yet does not know it."""
        pause = ABORT_AGAIN_S
        while not task.done():
            try:
                await self._abort(request_id)
            except Exception as error:
                sys.stderr.write(f"headrace engine: an abort failed: {type(error).__name__}\n")
            await asyncio.wait({task}, timeout=pause)
            pause = min(2 * pause, 1.0)

    async def _pump(self, request: ManagedRequest) -> None:
        """One request's task: whatever happens, its end is told once.

        Read to the end of the stream: closed early, an engine's generator would abort what has ended already.
        """
        is_over = has_spoken = False
        end = End.FAILED
        try:
            async for delta in self._generate(request):
                has_spoken = True
                if not is_over:
                    is_over = delta.end is not None
                    self._tell(delta)
            if not is_over:
                sys.stderr.write("headrace engine: a request's stream ended without an end\n")
        except Exception as error:
            if self._is_death(error):
                self._die(type(error).__name__)
                return
            sys.stderr.write(f"headrace engine: a request failed: {type(error).__name__}\n")
            if request.guided is not None and not has_spoken and isinstance(error, self._refusals):
                end = End.REFUSED
        if not is_over:
            self._tell(Delta(request.id, end=end))

    def _tell(self, delta: Delta) -> None:
        with self._lock:
            self._deltas.append(delta)
        self._wake()

    def _die(self, what: str) -> None:
        if self._death is None:
            self._death = what
            self._wake()

    async def _keep_looking(self) -> None:
        """An engine may die while it has nothing to say."""
        while self._death is None:
            try:
                self._stats = await self._look()
            except EngineDead as error:
                self._die(str(error))
            except Exception as error:
                if self._is_death(error):
                    self._die(type(error).__name__)
            await asyncio.sleep(HEALTH_EVERY_S)


GUIDED_BY_XGRAMMAR = frozenset({"json_schema", "json_object", "regex", "grammar", "choice"})
"""Kinds that an engine can do by xgrammar; a choice is written as a grammar."""


def choices_as_grammar(choices: Sequence[str]) -> str:
    """One of these texts, in the EBNF of xgrammar."""
    return "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)


def import_engine(name: str, config: EngineConfig, *, package: str) -> Any:
    """Imports an engine's library, after the devices that it may see are chosen. Raises `ConfigError`."""
    if config.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.gpus
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ConfigError(
            f"engine {config.engine} needs the package {package}, and the worker's Python cannot import {missing}."
        ) from None
    except Exception as error:
        raise ConfigError(f"engine {config.engine}: importing {name} failed with {type(error).__name__}.") from error
