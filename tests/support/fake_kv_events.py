"""The KV events of the fakes: a real ZeroMQ socket, events with exactly the recorded fields, and JSON for msgpack.

msgspec, which vLLM and SGLang bring along, is no part of this environment, so a stand-in that speaks JSON takes its
place on both sides.
"""

from __future__ import annotations

import json
import time
from typing import Any

import zmq

from support.recorded import signature

MSGSPEC: dict[str, dict[str, Any]] = {"msgspec": {}, "msgspec.msgpack": {"decode": json.loads}}
"""Modules that take msgspec's place."""


class Publisher:
    """What an engine publishes at `endpoint`; `drop` leaves so many of the next messages out."""

    def __init__(self, engine: str, endpoint: str) -> None:
        self.drop = 0
        self._engine = engine
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind(endpoint)
        assert self._socket.poll(5000), "nobody has subscribed"  # an engine takes minutes to load, a fake does not
        self._number = 0
        self._hash = 0

    def publish(self, kind: str, blocks: int = 0, size: int = 0, **fields: Any) -> None:
        """One event of so many blocks, alone in its message."""
        if kind != "AllBlocksCleared":
            hashes = list(range(self._hash, self._hash + blocks))
            self._hash += blocks
            known = signature(self._engine, kind).parameters
            fields = {**dict.fromkeys(known), "block_hashes": hashes, "medium": "GPU", **fields}
            if kind == "BlockStored":
                fields |= {"block_size": size, "token_ids": [0] * (blocks * size)}
        self.send([time.time(), [{"type": kind, **fields}], 0])

    def send(self, batch: Any) -> None:
        """A message as it is."""
        number, self._number = self._number, self._number + 1
        if self.drop:
            self.drop -= 1
            return
        self._socket.send_multipart((b"", number.to_bytes(8, "big"), json.dumps(batch).encode()))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
