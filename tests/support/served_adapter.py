"""One adapter of a GPU engine over its FAKE library, behind the contract, as model.py serves it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.engine.config import MANAGED_ENGINES, EngineConfig
from headrace.engine.contract import StepBatch
from headrace.engine.engine import Engine, make_engine


class Reader:
    """A sink that can be waited on."""

    def __init__(self) -> None:
        self.is_lost = self.is_congested = False
        self._batches: list[StepBatch] = []
        self._changed = threading.Condition()

    def put(self, batch: StepBatch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()

    def close(self, batch: StepBatch | None) -> None:
        if batch is not None:
            self.put(batch)

    def wait(self, found: Callable[[list[StepBatch]], bool], timeout_s: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: found(self._batches), timeout_s), "nothing came"

    def events(self, kind: str, seq: int) -> list[dict[str, Any]]:
        return [
            dict(event)
            for batch in list(self._batches)
            for event in batch.events
            if event["type"] == kind and event.get("seq") == seq
        ]

    def output(self, seq: int) -> tuple[list[int], str, list[float]]:
        ids: list[int] = []
        text = b""
        logprobs: list[float] = []
        for batch in list(self._batches):
            at = text_at = 0
            for owner, count, length in zip(batch.seqs, batch.token_counts, batch.text_lengths, strict=True):
                if owner == seq:
                    ids += batch.token_ids[at : at + count]
                    text += batch.text[text_at : text_at + length]
                    logprobs += list(batch.logprobs[at : at + count]) if batch.logprobs else []
                at += count
                text_at += length
        return ids, text.decode(), logprobs


class Served:
    """One adapter behind the contract, as model.py serves it."""

    def __init__(self, kind: str, folder: Path, **settings: Any) -> None:
        self.fake = importlib.import_module(f"support.fake_{kind}")
        self.fake.install()
        self.fake.engines.clear()
        settings = {"slots": 4, "kv_cells": 2048, "context_tokens": 512, "model_path": str(folder), **settings}
        self.engine: Engine = make_engine(EngineConfig(engine=kind, **settings))
        self.engine.start()
        self.reader = Reader()
        assert self.engine.handle(b"events", b"{}", [], lambda: self.reader) is None

    @property
    def library(self) -> Any:
        """The fake engine object that the adapter made."""
        return self.fake.engines[-1]

    def ask(self, op: str, document: Mapping[str, Any], tokens: list[int] | None = None) -> dict[str, Any]:
        reply = self.engine.handle(op.encode(), json.dumps(document).encode(), tokens or [], lambda: self.reader)
        assert reply is not None
        return reply

    def generate(self, seq: int, **request: Any) -> None:
        assert self.ask("generate", {"requests": [{"seq": seq, **request}]}) == {"ok": True}

    def finished(self, seq: int) -> dict[str, Any]:
        self.reader.wait(lambda _: bool(self.reader.events("finished", seq) or self.reader.events("refused", seq)))
        (event,) = self.reader.events("finished", seq) or self.reader.events("refused", seq)
        return event

    def answer(self, seq: int, **request: Any) -> tuple[dict[str, Any], list[int], str]:
        self.generate(seq, **request)
        event = self.finished(seq)
        ids, text, _ = self.reader.output(seq)
        return event, ids, text


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Adapters set variables for their library; nothing of that, and no fake module, is left behind."""
    environment, modules = dict(os.environ), set(sys.modules)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - modules:
            if name.split(".")[0] in (*MANAGED_ENGINES, "msgspec"):
                del sys.modules[name]
