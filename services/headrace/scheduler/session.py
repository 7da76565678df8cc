"""One Router's session: what waits to be sent to it, and the frames that carry it.

The engine's responses come in whole; a session keeps references to them until its writer is free, and then lays
them end to end in one frame. So a transport that is behind costs fewer writes, not more memory for each token.

What can wait is bounded by the credits that the Router itself granted. A Router that grants without end and does
not read is told so, and its session ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Any, Protocol

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.engine.contract import StepBatch

WAITING_TOKENS_MAX = 1_000_000
WAITING_BYTES_MAX = 32 * 1024 * 1024
WAITING_ENDS_MAX = 65_536
FRAME_BYTES_MAX = 2 * 1024 * 1024
"""Output after which a frame takes no further step; far below what a message may hold."""
LOAD_PERIOD_MIN_S = 0.1
_TOKEN_BYTES = 8
"""Rough cost of one token in a frame, ids and counts."""


class Loads(Protocol):
    """How busy the workers are."""

    @property
    def load_version(self) -> int:
        """Rises whenever the report may have changed."""

    def load_report(self) -> pb.LoadReport:
        """The report."""

    def attempts_of(self, session: int) -> list[int]:
        """Attempts of a session that have not ended."""


class Session:
    """The sending half of one Attach stream."""

    def __init__(self, number: int, router: str, loads: Loads) -> None:
        self.number = number
        self.router = router
        self.writes = 0
        self.wakeups = 0
        self._admitted: list[pb.Admitted] = []
        self._batches: deque[StepBatch] = deque()
        self._ended: list[pb.Ended] = []
        self._loads = loads
        self._inventory_due = 0
        """Number of the inventory that is asked for; 0: none is."""
        self._load_due = True
        self._load_version = -1
        self._load_sent_at = -math.inf
        self._waiting_tokens = 0
        self._waiting_bytes = 0
        self._wanted = asyncio.Event()
        self._overflown = False
        self.is_closing = False

    @property
    def waiting_tokens(self) -> int:
        """Tokens of output that wait to be sent."""
        return self._waiting_tokens

    @property
    def waiting_bytes(self) -> int:
        """Bytes of text that wait to be sent."""
        return self._waiting_bytes

    @property
    def is_overflown(self) -> bool:
        """Whether more waited than may; the session ends for it."""
        return self._overflown

    def put_output(self, batch: StepBatch) -> None:
        """Columns to forward, all of them this session's."""
        self._batches.append(batch)
        self._waiting_tokens += len(batch.token_ids)
        self._waiting_bytes += len(batch.text)
        if self._waiting_tokens > WAITING_TOKENS_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._overflown = True
        self._wanted.set()

    def put_admitted(self, message: pb.Admitted) -> None:
        """The engine has begun with an attempt."""
        self._admitted.append(message)
        self._wanted.set()

    def put_ended(self, message: pb.Ended) -> None:
        """An attempt is over; goes out after all output that was put before."""
        self._ended.append(message)
        if len(self._ended) > WAITING_ENDS_MAX:
            self._overflown = True
        self._wanted.set()

    def ask_load(self) -> None:
        """Send the workers' load now, even if nothing else is to be sent."""
        self._load_due = True
        self._wanted.set()

    def ask_inventory(self, number: int) -> None:
        """Send which attempts there are, behind the ends of those that are not there any more."""
        self._inventory_due = number
        self._wanted.set()

    def close(self) -> None:
        """Let `write` return once nothing waits any more."""
        self.is_closing = True
        self._wanted.set()

    async def write(self, context: Any) -> None:
        """Send what waits, frame by frame, until the session is closed.

        Raises:
            Failure: SLOW_CONSUMER, when the Router granted more than it reads.
        """
        while True:
            await self._wanted.wait()
            self.wakeups += 1
            self._wanted.clear()
            if self._overflown:
                raise Failure(Reason.SLOW_CONSUMER, "This session has more output waiting than it may hold; read it.")
            await context.write(self.take())
            self.writes += 1
            if self.is_closing and not self._wanted.is_set():
                return

    def take(self) -> pb.AttachResponse:
        """Build the next frame out of what waits."""
        frame = pb.AttachResponse()
        if self._admitted:
            frame.admitted.extend(self._admitted)
            self._admitted = []
        if self._batches:
            self._take_output(frame.deltas)
        if self._batches:
            self._wanted.set()  # the frame is full; what follows may not overtake it
        else:
            frame.ended.extend(self._ended)
            self._ended = []
            if self._inventory_due:
                frame.inventory.number = self._inventory_due
                frame.inventory.attempts.extend(self._loads.attempts_of(self.number))
                self._inventory_due = 0
        self._take_load(frame)
        return frame

    def _take_load(self, frame: pb.AttachResponse) -> None:
        version, now = self._loads.load_version, time.monotonic()
        changed = version != self._load_version and now - self._load_sent_at >= LOAD_PERIOD_MIN_S
        if self._load_due or changed:
            frame.load.CopyFrom(self._loads.load_report())
            self._load_due, self._load_version, self._load_sent_at = False, version, now

    def _take_output(self, deltas: pb.Deltas) -> None:
        batches = self._batches
        rich = any(batch.logprobs is not None for batch in batches)
        texts: list[bytes] = []
        size = 0
        while batches and size < FRAME_BYTES_MAX:
            batch = batches.popleft()
            count = len(batch.token_ids)
            self._waiting_tokens -= count
            self._waiting_bytes -= len(batch.text)
            size += len(batch.text) + _TOKEN_BYTES * count
            deltas.attempts.extend(batch.seqs)
            deltas.token_counts.extend(batch.token_counts)
            deltas.token_ids.extend(batch.token_ids)
            deltas.text_lengths.extend(batch.text_lengths)
            texts.append(batch.text)
            if rich:
                size += _append_logprobs(deltas, batch, count)
        deltas.text = texts[0] if len(texts) == 1 else b"".join(texts)


def _append_logprobs(deltas: pb.Deltas, batch: StepBatch, count: int) -> int:
    """Add a batch's log probabilities, or its absence of them; returns their rough size in bytes."""
    if batch.logprobs is None:
        deltas.logprobs.extend([math.nan] * count)
        deltas.top_counts.extend([0] * count)
        return 5 * count
    top_ids = batch.top_ids or []
    deltas.logprobs.extend(batch.logprobs)
    deltas.top_counts.extend(batch.top_counts or [0] * count)
    deltas.top_ids.extend(top_ids)
    deltas.top_logprobs.extend(batch.top_logprobs or [])
    return 5 * count + 8 * len(top_ids)
