"""Links to Schedulers: one long-lived Attach stream for each, frames for many requests.

A link turns frames into calls on the sessions that own the attempts, and what sessions want sent into frames:
all that waits when the transport is free goes out together. What it sees of attempts it tells the Router's `Routing`,
whose set of tokens is the count in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb_inference
from headrace.api.inference.v1.inference_service_pb2 import FinishReason
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control.errors import Reason
from headrace.control.filters import NO_DEMAND, Demand
from headrace.control.inventory import ASK_EVERY_S, Inventory
from headrace.control.routing import Routing
from headrace.rpc import status
from headrace.rpc.channels import internal_channel
from headrace.runtime.tasks import cancel_and_wait, retry_forever
from headrace.runtime.telemetry import get_logger

WELCOME_TIMEOUT_S = 5.0
CREDIT_DELAY_S = 0.003
"""How long a credit that nobody waits for yet waits for others, so that they travel in one frame."""


class AttemptOwner(Protocol):
    """What a link tells the session that owns an attempt. Calls are synchronous and quick."""

    def on_admitted(self, message: pb.Admitted) -> None:
        """The engine has begun."""

    def on_output(
        self,
        attempt: int,
        text: bytes,
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[float, list[tuple[int, float]]]],
    ) -> None:
        """More output; `logprobs` has one entry a token if the request asked."""

    def on_ended(self, message: pb.Ended) -> bool:
        """The attempt is over and its resources are free. False: the message does not count, the attempt goes on."""

    def on_lost(self, attempt: int) -> None:
        """The link broke, or its Scheduler does not know the attempt: what became of it is unknown, and it is over."""


class SchedulerLink:
    """The stream to one Scheduler. Reconnects for as long as it is open."""

    def __init__(
        self,
        endpoint: str,
        *,
        router: str,
        incarnation: str,
        on_load: Callable[[pb.LoadReport], None] | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._on_load = on_load
        self._routing = routing or Routing()
        self.frames_in = 0
        self.frames_out = 0
        self.late_messages = 0
        self._hello = pb.Hello(router=router, incarnation=incarnation)
        self._owners: dict[int, AttemptOwner] = {}
        self._outgoing = pb.AttachRequest()
        self._wanted = asyncio.Event()
        self._credit_timer: asyncio.TimerHandle | None = None
        self.inventory = Inventory()
        """Keeps what is counted here in line with what the Scheduler has."""
        self._inventory_timer: asyncio.TimerHandle | None = None
        self.is_up = False
        """Whether attempts can be dispatched now."""
        self._task: asyncio.Task[None] | None = None
        self._on_idle: Callable[[], None] | None = None
        self._log = get_logger().bind(scheduler_endpoint=endpoint)

    @property
    def attempts(self) -> int:
        """Attempts that have not ended."""
        return len(self._owners)

    def open(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.endpoint}")

    async def close(self) -> None:
        """End the stream; attempts that still run are lost, and their owners are told."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    def dispatch(self, message: pb.Dispatch, owner: AttemptOwner, demand: Demand = NO_DEMAND) -> None:
        """Start an attempt. `owner` hears of it until it ended or is lost; `demand` is what its request asked for."""
        attempt, now = message.attempt, time.monotonic()
        self._owners[attempt] = owner
        self._routing.dispatched(attempt, message.replica, message.epoch, message.revision, demand, now)
        self._outgoing.dispatches.append(message)
        self._wanted.set()

    def grant(self, attempt: int, limit: int, *, urgent: bool) -> None:
        """Let an attempt generate up to `limit` tokens, counted from its start; `urgent`: it waits for them."""
        if attempt not in self._owners:
            return
        self._outgoing.credits.add(attempt=attempt, limit=limit)
        if urgent:
            self._wanted.set()
        elif self._credit_timer is None:
            self._credit_timer = asyncio.get_running_loop().call_later(CREDIT_DELAY_S, self._send_credits)

    def ask_inventory(self) -> None:
        """Ask which attempts the Scheduler has, now and again every few seconds; the answer mends what differs."""
        self._outgoing.inventory_request = self.inventory.ask(self._owners)
        self._wanted.set()
        self._ask_later()

    def _ask_later(self) -> None:
        if self._inventory_timer is not None:
            self._inventory_timer.cancel()
        self._inventory_timer = asyncio.get_running_loop().call_later(ASK_EVERY_S, self.ask_inventory)

    def _send_credits(self) -> None:
        self._credit_timer = None
        self._wanted.set()

    def cancel(self, attempt: int, cause: FinishReason) -> None:
        """Ask for the end of an attempt; its `ended` still comes."""
        if attempt in self._owners:
            self._outgoing.cancels.add(attempt=attempt, cause=cause)
            self._wanted.set()

    async def _run(self) -> None:
        def on_error(error: Exception, delay_s: float) -> None:
            self._log.warning("scheduler_link_broken", error_type=type(error).__name__, retry_in_s=round(delay_s, 2))

        async with internal_channel(self.endpoint) as channel:
            await retry_forever(lambda: self._session(channel), on_error=on_error, max_delay_s=1.0)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call = SchedulerServiceStub(channel).Attach()
        writer: asyncio.Task[None] | None = None
        try:
            # The write too: it waits for the connection, and a peer that accepts and stays silent never makes one.
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await call.write(pb.AttachRequest(hello=self._hello))
                first = await call.read()
            if not isinstance(first, pb.AttachResponse) or not first.HasField("welcome"):
                raise ConnectionError("the Scheduler did not say welcome")
            self._outgoing.Clear()
            self.is_up = True
            self._ask_later()
            self._log.info("scheduler_link_up", scheduler=first.welcome.scheduler)
            writer = asyncio.create_task(self._write(call), name=f"link-writer-{self.endpoint}")
            while True:
                frame = await call.read()
                if not isinstance(frame, pb.AttachResponse):
                    raise ConnectionError("the Scheduler ended the stream")
                self.frames_in += 1
                self._take(frame)
        finally:
            self.is_up = False
            self.inventory.close()
            if self._inventory_timer is not None:
                self._inventory_timer.cancel()
            call.cancel()
            if writer is not None:
                await cancel_and_wait(writer)
            self._lose_all()

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]) -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                frame, self._outgoing = self._outgoing, pb.AttachRequest()
                if self._credit_timer is not None:
                    self._credit_timer.cancel()
                    self._credit_timer = None
                await call.write(frame)
                self.frames_out += 1
        except Exception:  # the reader sees the end of the call and says why
            call.cancel()

    def _take(self, frame: pb.AttachResponse) -> None:
        owners = self._owners
        if self._on_load is not None and frame.HasField("load"):
            self._on_load(frame.load)
        for admitted in frame.admitted:
            entry = owners.get(admitted.attempt)
            if entry is None:
                self.late_messages += 1
            else:
                self._routing.admitted(
                    admitted.attempt, admitted.prompt_tokens, admitted.cached_prompt_tokens, time.monotonic()
                )
                entry.on_admitted(admitted)
        if frame.HasField("deltas"):
            self._take_deltas(frame.deltas)
        for ended in frame.ended:
            entry = owners.get(ended.attempt)
            if entry is None:
                self.late_messages += 1
            elif entry.on_ended(ended):
                del owners[ended.attempt]
                failure = status.from_proto(ended.error) if ended.HasField("error") else None
                self._routing.ended(ended.attempt, failure.reason if failure else None, time.monotonic())
        if frame.HasField("inventory"):
            self._reconcile(frame.inventory)

    def _reconcile(self, answer: pb.Inventory) -> None:
        """The Scheduler has told which attempts it has: what is behind its ends is in this frame or was before."""
        found = self.inventory.answer(answer.number, answer.attempts, self._owners.keys())
        if found.lost or found.unknown:
            self._log.warning("inventories_differ", lost=len(found.lost), unknown=len(found.unknown))
        for attempt in found.unknown:
            self._outgoing.cancels.add(attempt=attempt, cause=pb_inference.FINISH_REASON_CANCELLED)
            self._wanted.set()
        for attempt in found.lost:
            owner = self._owners.pop(attempt)
            self._routing.ended(attempt, Reason.WORKER_LOST_BEFORE_OUTPUT, time.monotonic())
            owner.on_lost(attempt)

    def _take_deltas(self, deltas: pb.Deltas) -> None:
        """Cut the columns and hand out the parts. Runs once a step, its body once an attempt."""
        owners, silent = self._owners, self._routing.silent
        text = deltas.text
        ids = list(deltas.token_ids)
        logprobs = _cut_logprobs(deltas) if deltas.logprobs else ()
        text_at = id_at = 0
        for attempt, count, length in zip(deltas.attempts, deltas.token_counts, deltas.text_lengths, strict=True):
            entry = owners.get(attempt)
            if entry is None:
                self.late_messages += 1
            else:
                if attempt in silent:
                    self._routing.first_output(attempt, time.monotonic())
                entry.on_output(
                    attempt,
                    text[text_at : text_at + length],
                    ids[id_at : id_at + count],
                    logprobs[id_at : id_at + count] if logprobs else (),
                )
            text_at += length
            id_at += count

    def _lose_all(self) -> None:
        lost, self._owners = self._owners, {}
        now = time.monotonic()
        for attempt in lost:
            self._routing.ended(attempt, Reason.WORKER_LOST_BEFORE_OUTPUT, now)
        for attempt, owner in lost.items():
            owner.on_lost(attempt)


def _cut_logprobs(deltas: pb.Deltas) -> list[tuple[float, list[tuple[int, float]]]]:
    found = []
    at = 0
    for logprob, count in zip(deltas.logprobs, deltas.top_counts, strict=True):
        alternatives = list(zip(deltas.top_ids[at : at + count], deltas.top_logprobs[at : at + count], strict=True))
        found.append((logprob, alternatives))
        at += count
    return found
