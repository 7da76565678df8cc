"""Puts an engine together from its configuration, and drives its loop in a thread."""

from __future__ import annotations

import contextlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace.engine.backend import Backend
from headrace.engine.chat import ChatTemplate
from headrace.engine.config import MANAGED_ENGINES, ConfigError, EngineConfig
from headrace.engine.intake import Intake, Published
from headrace.engine.loop import EngineLoop
from headrace.engine.managed import ManagedEngine
from headrace.engine.managed_loop import DEFAULT_ABORT, Abort, HostedBackend, ManagedLoop
from headrace.engine.operations import Operation
from headrace.engine.owner import Sink
from headrace.engine.synthetic import SyntheticBackend

INBOX_MAX = 4096
# What a rendered conversation may have, by token of context: no tokenizer that we know packs more on average.
_CHARACTERS_PER_TOKEN = 16


def make_engine(config: EngineConfig) -> Engine:
    """The engine that the configuration names, not yet started; raises `ConfigError` when it cannot be made.

    A managed engine is loaded here: what its model is, is not known before.
    """
    if config.engine not in MANAGED_ENGINES:
        return Engine(config, make_backend(config))
    wakening = Wakening()
    managed = make_managed(config)
    try:
        managed.start(wakening.wake)
        return Engine(config, HostedBackend(managed), managed=managed, wakening=wakening)
    except BaseException:
        managed.shutdown()
        raise


def make_managed(config: EngineConfig) -> ManagedEngine:
    """An adapter, not yet started: nothing of its library has been imported."""
    adapter = import_module(f"headrace.engine.{config.engine}")
    engine: ManagedEngine = adapter.make(config)
    return engine


def make_backend(config: EngineConfig) -> Backend:
    """The backend of an engine that is stepped; raises `ConfigError` when it cannot be made."""
    if config.engine == "synthetic":
        return SyntheticBackend(prefill_rate=config.prefill_tokens_per_s, decode_rate=config.decode_tokens_per_s)
    from headrace.engine.llamacpp import LlamaBackend  # not at the top: only such a worker has the library

    return LlamaBackend(config, lanes=lanes_of(config))


def lanes_of(config: EngineConfig) -> int:
    """Sequence ids: one per slot, and as many again for retained prefixes, within llama.cpp's limit of 256."""
    return min(2 * config.slots, config.slots + 64)


class Wakening:
    """How a managed engine wakes the loop: with a word in its inbox, and one at a time is enough."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Operation | None] = queue.Queue(INBOX_MAX)
        self._is_due = False

    def wake(self) -> None:
        """From any thread."""
        if not self._is_due:
            self._is_due = True
            with contextlib.suppress(queue.Full):  # full: the loop is awake anyway
                self.inbox.put_nowait(None)

    def is_awake(self) -> None:
        """The loop looks now; who comes later has to wake it again."""
        self._is_due = False


class Engine:
    """One engine with its thread. `managed` is behind `backend` where it schedules by itself.

    Raises `ConfigError` from the constructor.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        *,
        managed: ManagedEngine | None = None,
        wakening: Wakening | None = None,
    ) -> None:
        facts = backend.facts
        if facts.context_tokens_max and config.context_tokens > facts.context_tokens_max:
            raise ConfigError(f"context_tokens must be at most {facts.context_tokens_max}, the model's own limit.")
        self._backend = backend
        self._wakening = wakening or Wakening()
        self._inbox = self._wakening.inbox
        self._loop = _make_loop(config, backend, managed)
        self._published = Published(time.monotonic_ns(), self._loop.stats(), None)
        self._intake = Intake(
            backend,
            context_tokens=config.context_tokens,
            template=_template(config, backend),
            submit=self._submit,
            published=lambda: self._published,
            draw_seed=lambda: secrets.randbits(32),
            clock=time.monotonic_ns,
            **({} if managed is None else {"check": managed.check}),
        )
        self._is_stopping = False
        self._warm = threading.Event()
        self._cold: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the loop's thread and waits until it has warmed the backend up. Raises what the warm-up raised."""
        self._thread.start()
        self._warm.wait()
        if self._cold is not None:
            raise self._cold

    def handle(
        self, op: bytes, request: bytes, tokens: Sequence[int], open_sink: Callable[[], Sink]
    ) -> dict[str, Any] | None:
        """See `Intake.handle`."""
        return self._intake.handle(op, request, tokens, open_sink)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends every sequence and stream, then the thread, then the backend."""
        self._is_stopping = True
        with contextlib.suppress(queue.Full):  # full: the loop is awake anyway
            self._inbox.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
            self._backend.close()

    def _submit(self, operation: Operation) -> bool:
        try:
            self._inbox.put_nowait(operation)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        # Warmed up in the thread that computes later: OpenMP keeps a team of workers for each thread that enters it.
        # With two teams on the same cores it stops spinning at barriers, which costs llama.cpp a third of its speed.
        try:
            self._backend.warm_up()
        except Exception as error:
            self._cold = error
            return
        finally:
            self._warm.set()
        while not self._is_stopping:
            try:
                operations = self._gather(self._loop.wait_s())
                self._wakening.is_awake()
                self._loop.turn(operations)
            except Exception as error:  # whatever it was, its sequences get an end
                self._fail(error)
                return
            self._published = Published(time.monotonic_ns(), self._loop.stats(), None)

    def _gather(self, wait_s: float) -> list[Operation]:
        operations: list[Operation] = []
        try:
            operation = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while operation is not None:
                operations.append(operation)
                operation = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return operations

    def _fail(self, error: Exception) -> None:
        """An error id, the class and where: never the error's text, which may quote a prompt."""
        error_id = secrets.token_hex(8)
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_qualname}:{place.tb_lineno}" if place is not None else "?"
        sys.stderr.write(f"headrace engine: failed, error id {error_id}: {type(error).__name__} in {where}\n")
        sys.stderr.flush()
        self._published = Published(time.monotonic_ns(), self._published.stats, error_id)
        try:
            self._loop.fail(error_id)
        except Exception as second:
            sys.stderr.write(f"headrace engine: {error_id}: {type(second).__name__} while ending sequences\n")


def _make_loop(config: EngineConfig, backend: Backend, managed: ManagedEngine | None) -> EngineLoop:
    common: dict[str, Any] = {
        "identity": _identity(config, backend),
        "incarnation": config.incarnation,
        "slots": config.slots,
        "kv_cells": config.kv_cells,
        "lanes": lanes_of(config),
        "max_waiting": config.max_waiting,
        "prefill_chunk": config.prefill_chunk,
        "preempt_after_ns": config.preempt_after_ms * 1_000_000,
        "run_ahead_tokens": config.run_ahead_tokens,
        "kv_over_commit": config.kv_over_commit,
        "clock": time.monotonic_ns,
    }
    if managed is None:
        return EngineLoop(backend, **common)
    return ManagedLoop(managed, abort=Abort(config.abort or DEFAULT_ABORT[config.engine]), **common)


def _identity(config: EngineConfig, backend: Backend) -> dict[str, Any]:
    facts = backend.facts
    return {
        "kind": facts.kind,
        "revision": config.revision,
        "model": facts.model,
        "digest": config.model_digest,
        "context_tokens": config.context_tokens,
        "slots": config.slots,
        "kv_cells": config.kv_cells,
        "vocabulary": facts.vocabulary,
        "guided": sorted(facts.guided),
        "pause": "run_ahead" if config.run_ahead_tokens else "native",
        "priority": True,  # REQUEST may have one
        "goes_on": True,  # an owner may open its next stream without losing what runs
        "shapes": {"prefill": config.prefill_chunk, "decode": _batch_sizes(config.slots)},
        "versions": {"headrace": _version("headrace"), **facts.versions},
    }


def _batch_sizes(slots: int) -> list[int]:
    """Sizes of a decoding batch to be warmed up: powers of two below all slots, and all slots."""
    return [*(2**n for n in range(slots.bit_length()) if 2**n < slots), slots]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


def _template(config: EngineConfig, backend: Backend) -> ChatTemplate | None:
    source = config.chat_template if config.chat_template is not None else backend.facts.chat_template
    if not source:
        return None
    try:
        return ChatTemplate(
            source,
            begin_text=backend.facts.begin_text,
            end_text=backend.facts.end_text,
            characters_max=max(4096, config.context_tokens * _CHARACTERS_PER_TOKEN),
        )
    except ValueError as error:
        raise ConfigError(f"chat_template is not usable: {error}") from error
