"""What an engine's prefix cache stores and removes, counted in tokens out of the engine's own events.

vLLM and SGLang publish them on a ZeroMQ socket: of each step one message of three parts, topic, number, and a batch in
msgpack. TensorRT-LLM keeps them in a buffer that is asked for. All are read when the adapter looks, twice a second, and
never more than so many at a time; what is lost on the way is seen by a gap in the numbers and counted.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engine.config import ConfigError

READ_MAX = 2048
"""Messages of one look; at two looks a second more than any engine takes steps."""
WAITING_MAX = 8192
"""Messages that wait on each side of the socket; then the oldest news is kept and what comes is dropped."""
_DEVICE = (None, "GPU")
_STRANGE = (ValueError, TypeError, LookupError, AttributeError)
"""What an event of another form raises: it is as good as lost."""


class KvCounts:
    """Tokens that were stored and removed since the engine's start, and messages that were lost."""

    def __init__(self) -> None:
        self.stored = self.removed = self.lost = 0

    def store(self, tokens: int) -> None:
        """They can be reused from now on."""
        self.stored += tokens

    def remove(self, tokens: int) -> None:
        """They cannot any more. Lost news may have been of their storing: never more goes than came."""
        self.removed = min(self.stored, self.removed + tokens)

    def clear(self) -> None:
        """All of them are gone."""
        self.removed = self.stored


class ZmqEvents:
    """The events of one vLLM or SGLang of this machine. Used by one thread: `open`, `read` now and then, `close`.

    Args:
        block: tokens of a block.
        engine: for the refusal.
    """

    def __init__(self, block: int, engine: str) -> None:
        self.counts = KvCounts()
        self._block = block
        self._next = 0
        # Its owner's alone: events hold the tokens of prompts.
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-kv-"))
        self.endpoint = f"ipc://{self._folder}/events"
        """Where the engine is to publish."""
        try:
            self._zmq = importlib.import_module("zmq")
            self._decode = importlib.import_module("msgspec.msgpack").decode
        except ImportError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(
                f"kv_events needs {error.name} in the worker's Python, which comes with {engine}; or leave them off."
            ) from None
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.set_hwm(WAITING_MAX)
        self._socket.setsockopt(self._zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)  # which need not be there yet

    def read(self) -> None:
        """Count what has come, at most `READ_MAX` messages; waits for none."""
        for _ in range(READ_MAX):
            try:
                parts = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                self._take(parts)
            except _STRANGE:
                self.counts.lost += 1

    def close(self) -> None:
        """Give socket and folder back; safe to call again."""
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, parts: Sequence[bytes]) -> None:
        _, number, payload = parts
        at = int.from_bytes(number, "big")
        self.counts.lost += max(0, at - self._next)
        self._next = at + 1
        batch = self._decode(payload)
        for event in batch["events"] if isinstance(batch, Mapping) else batch[1]:
            self._count(*_fields(event))

    def _count(self, kind: str, hashes: int, size: int, medium: object, group: object) -> None:
        if kind == "AllBlocksCleared":
            self.counts.clear()
        elif medium in _DEVICE and not group:  # other groups of layers keep the same tokens once more
            if kind == "BlockStored":
                self.counts.store(hashes * (size or self._block))
            elif kind == "BlockRemoved":
                self.counts.remove(hashes * self._block)


def _fields(event: Any) -> tuple[str, int, int, object, object]:
    """Kind, number of blocks, their size, where they are and of which group. Events are maps or, in older releases,
    arrays that begin with their kind.
    """
    if isinstance(event, Mapping):
        hashes = event.get("block_hashes") or ()
        return event["type"], len(hashes), event.get("block_size", 0), event.get("medium"), event.get("group_idx")
    kind, rest = event[0], event[1:]
    if kind == "BlockStored":
        return kind, len(rest[0]), rest[3], rest[5] if len(rest) > 5 else None, None
    return kind, len(rest[0]) if rest else 0, 0, rest[1] if len(rest) > 1 else None, None


class BufferedEvents:
    """The events of a TensorRT-LLM, as documents."""

    def __init__(self, block: int) -> None:
        self.counts = KvCounts()
        self._block = block
        self._next: int | None = None

    def take(self, events: Iterable[Any]) -> None:
        """Count what was in the buffer."""
        for event in events:
            try:
                if event:  # an empty one says that there is none
                    self._take(json.loads(event) if isinstance(event, str) else event)
            except _STRANGE:
                self.counts.lost += 1

    def _take(self, event: Mapping[str, Any]) -> None:
        at, data = int(event["event_id"]), event["data"]
        if self._next is not None:
            self.counts.lost += max(0, at - self._next)
        self._next = at + 1
        if data["type"] == "stored":
            self.counts.store(self._block * sum(block.get("cache_level", 0) == 0 for block in data["blocks"]))
        elif data["type"] == "removed":
            self.counts.remove(self._block * len(data["block_hashes"]))
