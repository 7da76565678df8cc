"""One response stream: a thread that sends what waits, merged, so that the loop never does.

It also watches for the stream's end: Triton says so only when asked, and asking costs 60 µs of IPC, so it is asked
at most every 50 ms. Memory is bounded: beyond `TOKENS_MAX` waiting tokens the stream calls itself congested, and the
loop does not step until the transport has caught up.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from headrace.engine.contract import StepBatch, Tensor, encode_step, merge

LOOK_EVERY_S = 0.05
# About 1 MiB as a response: far above what is in flight, far below what a reader must accept.
TOKENS_MAX = 32_768


class Responder(Protocol):
    """Triton's response sender, as far as it is used here."""

    def send(self, tensors: Sequence[Tensor], *, is_final: bool) -> None:
        """Sends one response; without tensors, the flag alone."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        ...


class StreamSink:
    """See `owner.Sink`. `start` begins sending; the thread ends with FINAL, whatever happens."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._condition = threading.Condition()
        self._waiting: list[StepBatch] = []
        self._waiting_tokens = 0
        self._is_closed = False
        self._is_lost = False
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        """Starts the sender thread."""
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the client has gone or sending has failed."""
        return self._is_lost

    @property
    def is_congested(self) -> bool:
        """Whether the transport is far behind."""
        return self._waiting_tokens > TOKENS_MAX

    def put(self, batch: StepBatch) -> None:
        """Hands a response to the sender thread; dropped when nobody listens."""
        with self._condition:
            if self._is_closed or self._is_lost:
                return
            self._waiting.append(batch)
            self._waiting_tokens += len(batch.token_ids)
            self._condition.notify()

    def close(self, batch: StepBatch | None) -> None:
        """Sends what waits, `batch` and FINAL, then ends the thread."""
        if batch is not None:
            self.put(batch)
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._send_until_closed()
        except Exception as error:  # a stream that cannot be sent is a lost stream
            sys.stderr.write(f"headrace engine: a response stream failed: {type(error).__name__}\n")
            self._lose()
            self._finish_quietly()

    def _send_until_closed(self) -> None:
        next_look = time.monotonic() + LOOK_EVERY_S
        while True:
            with self._condition:
                if not self._waiting and not self._is_closed:
                    self._condition.wait(max(0.0, next_look - time.monotonic()))
                batches, self._waiting = self._waiting, []
                self._waiting_tokens = 0
                is_final = self._is_closed
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_EVERY_S
                if self._responder.is_cancelled():
                    self._lose()
                    self._finish_quietly()
                    return
            if batches:
                batch = merge(batches)
                self._number += 1
                batch.number = self._number
                self._responder.send(encode_step(batch), is_final=is_final)
            elif is_final:
                self._responder.send([], is_final=True)
            if is_final:
                return

    def _lose(self) -> None:
        with self._condition:
            self._is_lost = True
            self._waiting.clear()
            self._waiting_tokens = 0

    def _finish_quietly(self) -> None:
        """Triton keeps a request until FINAL, even when its client has gone."""
        try:
            self._responder.send([], is_final=True)
        except Exception as error:
            sys.stderr.write(f"headrace engine: FINAL of a lost stream failed: {type(error).__name__}\n")
