"""The Scheduler's half of the engine contract: one event stream, one stream of operations, one verdict.

    EngineClient.open() -> hello                    both streams are up
    EngineClient.run()  -> raises EngineLost        reads until the engine is gone, whatever the way
    generate / credit / cancel                      never wait; what waits together goes out as one operation

The event stream is read at full speed and each response is handed to the sink at once, in this task: no task,
queue or copy for a token. What the engine may produce is bounded by credits, never by not reading.

Losing either stream is losing the engine: the contract ends an owner's sequences with its stream, so there is
nothing to resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.control.deadlines import Budget
from headrace.control.worker_health import SILENCE_MAX_S
from headrace.engine.contract import Reply, StepBatch, WireError, decode_response, encode_op
from headrace.rpc.channels import KEEPALIVE
from headrace.triton.event_stream import EngineLost, EventStream
from headrace.triton.outbox import Operation, Outbox
from headrace.triton.wire import MODEL, classify_error, infer_request

RECEIPT_MAX_S = 5.0
OPERATIONS_OUT_MAX = 8
"""Operations without a receipt; more wait and are merged meanwhile."""
_WATCH_S = 0.5

_OPTIONS: list[tuple[str, int | str]] = [
    *KEEPALIVE,
    ("grpc.enable_retries", 0),
    # Triton opens its port only once the model has loaded: do not sleep past that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


class EngineSink(Protocol):
    """Told, in the event loop and without waiting, what the engine says."""

    def on_batch(self, batch: StepBatch) -> None:
        """One response of the event stream."""

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        """Sequences were refused before the engine began; `error` is an ERROR of the contract."""


@dataclass(slots=True)
class _Receipt:
    """An operation that has no answer yet."""

    answered: asyncio.Future[dict[str, Any]] | None
    due_at: float
    seqs: tuple[int, ...] = ()


class EngineClient:
    """One engine behind one Triton. Belongs to one event loop; used once: open, run, close."""

    def __init__(self, target: str, *, owner: str, sink: EngineSink) -> None:
        self.target = target
        self.hello: Mapping[str, Any] = {}
        """The engine's own description, from the hello event."""
        self.stats: Mapping[str, Any] = {}
        """The newest statistics that came with an `alive` event."""
        self.is_patient = False
        """While it warms up a step may take as long as it takes: silence is no death, its end is. Who sets it has a
        deadline."""
        self.messages = 0
        """Responses read from the event stream."""
        self.heard_at = time.monotonic()
        """When the engine's loop was last heard, monotonic seconds."""
        self._owner = owner
        self._sink = sink
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._event_stream = EventStream
        self._events: EventStream | None = None
        self._operations: Any = None
        self._ids = itertools.count(1)
        self._outbox = Outbox(sink.on_refused)
        self._receipts: dict[str, _Receipt] = {}
        self._work = asyncio.Event()
        self._heard = False
        self._condemned = ""

    @property
    def is_local(self) -> bool:
        """Whether the engine runs on this host, so that its monotonic clock is ours."""
        host = self.target.rpartition(":")[0].strip("[]")
        return host in ("localhost", "::1") or host.startswith("127.") or self.target.startswith("unix:")

    async def wait_loaded(self) -> None:
        """Return once Triton says that the model is ready. Waits for ever: the caller holds the deadline."""
        request = service_pb2.ModelReadyRequest(name=MODEL)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await self._stub.ModelReady(request, wait_for_ready=True, timeout=10)).ready:
                    return
            await asyncio.sleep(0.1)

    async def open(self, timeout_s: float) -> Mapping[str, Any]:
        """Open both streams and return the engine's hello.

        Raises:
            EngineLost: no engine answered within `timeout_s`, or it speaks another contract.
        """
        self._events = self._event_stream(self._stub.ModelStreamInfer(), self._owner)
        self._operations = self._stub.ModelStreamInfer()
        try:
            async with asyncio.timeout(timeout_s):
                hello = await self._events.open()
        except TimeoutError:
            raise EngineLost(f"the engine did not say hello within {timeout_s:g} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise EngineLost(_call_ended("event", error)) from None
        if hello.get("contract") != "headrace.engine.v1" or not isinstance(hello.get("engine"), dict):
            raise EngineLost("the engine speaks another contract than headrace.engine.v1")
        self.hello = hello["engine"]
        return self.hello

    async def run(self) -> None:
        """Read and write until the engine is lost; returns only through an exception.

        Raises:
            EngineLost: how it was lost.
        """
        lost: EngineLost | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_events(), name="engine events")
                tasks.create_task(self._read_replies(), name="engine replies")
                tasks.create_task(self._write_operations(), name="engine operations")
                tasks.create_task(self._watch(), name="engine watch")
        except* EngineLost as group:
            lost = _first(group)
        finally:
            self._abandon()
        if lost is not None:  # not inside `except*`: before Python 3.11.4 that wraps it in a group again
            raise lost

    async def close(self) -> None:
        """Close the streams; the engine ends what this owner still runs. Safe to call again."""
        if self._events is not None:
            self._events.call.cancel()
        if self._operations is not None:
            self._operations.cancel()
        await self._channel.close()

    # Operations. None of them waits; their outcome is told by events.

    def generate(
        self,
        request: Mapping[str, Any],
        tokens: Sequence[int] = (),
        *,
        input_bytes: int = 0,
        budget: Budget | None = None,
    ) -> None:
        """Submit one REQUEST.

        Args:
            request: without `deadline_ms` and `queue_ms` where there is a budget: they are what is left of it when the
                operation is written. One whose time is gone by then is refused from here.
            tokens: its prompt's ids when it says `prompt_tokens`.
            input_bytes: size of its input, so that operations stay small.
            budget: its limits; None leaves the request as it is.
        """
        if "priority" in request and not self.hello.get("priority"):  # an older engine refuses what it does not know
            request = {name: value for name, value in request.items() if name != "priority"}
        self._outbox.generate(request, tokens, input_bytes, budget)
        self._work.set()

    def credit(self, seq: int, limit: int) -> None:
        """Raise the limit of a sequence."""
        if self._outbox.credit(seq, limit):
            self._work.set()

    def cancel(self, seqs: Sequence[int], reason: str = "cancelled") -> None:
        """End sequences between two steps; their `finished` event confirms it."""
        self._outbox.cancel(seqs, reason)
        self._work.set()

    def condemn(self, why: str) -> None:
        """Let `run` end with EngineLost within a moment: `why` is a sentence about an engine that is up and useless."""
        self._condemned = why

    def list_sequences(self) -> None:
        """Ask for a `sequences` event: which of this owner's sequences live."""
        self._outbox.calls.append(("list", None))
        self._work.set()

    async def ping(self, timeout_s: float = RECEIPT_MAX_S) -> Mapping[str, Any]:
        """Ask the engine's loop for its statistics; `run` must be running.

        Raises:
            EngineLost: no answer in time.
        """
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._outbox.calls.append(("ping", answered))
        self._work.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise EngineLost(f"the engine did not answer a ping within {timeout_s:g} s") from None

    # Reading

    async def _read_events(self) -> None:
        events = self._events
        assert events is not None, "opened before"
        try:
            while (batch := await events.read()) is not None:
                self.messages += 1
                self._heard, self.heard_at = True, time.monotonic()
                if batch.final:
                    raise EngineLost("the engine ended the event stream: it stops, or another Scheduler took it over")
                for event in batch.events:
                    kind = event.get("type")
                    if kind == "alive":
                        self.stats = event.get("stats", self.stats)
                    elif kind in ("finished", "refused"):
                        self._outbox.forget(event.get("seq", 0))
                self._sink.on_batch(batch)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise _lost_or_cancelled("event", error) from None
        raise EngineLost("the event stream ended")

    async def _read_replies(self) -> None:
        try:
            while (response := await self._operations.read()) is not grpc.aio.EOF:
                self._on_reply(response)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise _lost_or_cancelled("operation", error) from None
        raise EngineLost("the operation stream ended")

    def _on_reply(self, response: Any) -> None:
        receipt = self._receipts.pop(response.infer_response.id, None)
        self._work.set()
        if response.error_message:
            fault = classify_error(response.error_message)
            if fault.is_fatal or receipt is None:
                raise EngineLost(fault.value)
            document: dict[str, Any] = {"error": {"reason": "ENGINE_FAILED", "message": f"{fault.value}."}}
        else:
            try:
                reply = decode_response(response.infer_response)
            except WireError as error:
                raise EngineLost(f"the engine broke its contract: {error}") from None
            if receipt is None or not isinstance(reply, Reply):
                return
            document = reply.document
        if receipt.answered is not None and not receipt.answered.done():
            receipt.answered.set_result(document)
        if receipt.seqs and not document.get("ok"):
            self._sink.on_refused(receipt.seqs, document.get("error") or {})

    # Writing

    async def _write_operations(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while len(self._receipts) < OPERATIONS_OUT_MAX:
                    operation = self._outbox.next(time.monotonic())
                    if operation is None:
                        break
                    await self._operations.write(self._encode(operation))
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise _lost_or_cancelled("operation", error) from None

    def _encode(self, operation: Operation) -> Any:
        name = f"{operation.op}-{next(self._ids)}"
        due_at = asyncio.get_running_loop().time() + RECEIPT_MAX_S
        self._receipts[name] = _Receipt(operation.answered, due_at, operation.seqs)
        return infer_request(name, encode_op(operation.op, operation.document, operation.tokens))

    # Liveness

    async def _watch(self) -> None:
        """A dead engine in Triton 2.51 is silent for ever, so silence is death.

        Checks are counted, not clocked: when it was this process that stood still, one late check is not
        three seconds of the engine's silence.
        """
        silent = overdue = 0
        while True:
            await asyncio.sleep(_WATCH_S)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            if self._condemned:
                raise EngineLost(self._condemned)
            if self.is_patient:
                silent = overdue = 0
                continue
            if silent * _WATCH_S >= SILENCE_MAX_S:
                raise EngineLost(f"the engine was silent for {SILENCE_MAX_S:g} s")
            oldest = next(iter(self._receipts.values()), None)  # entered in the order of their due times
            is_late = oldest is not None and asyncio.get_running_loop().time() > oldest.due_at
            overdue = overdue + 1 if is_late else 0
            if overdue >= 2:
                raise EngineLost(f"the engine did not take an operation within {RECEIPT_MAX_S:g} s")

    def _abandon(self) -> None:
        waiting = [answered for _, answered in self._outbox.calls if answered is not None]
        waiting += [receipt.answered for receipt in self._receipts.values() if receipt.answered is not None]
        for answered in waiting:
            if not answered.done():
                answered.set_exception(EngineLost("the engine was lost before it answered"))


def _first(group: BaseExceptionGroup[EngineLost]) -> EngineLost:
    """Any of them: they are one loss, seen by several tasks."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _call_ended(stream: str, error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"the {stream} stream ended with {error.code().name}"
    return f"the {stream} stream ended"


def _lost_or_cancelled(stream: str, error: BaseException) -> BaseException:
    """Tell our own cancellation from a call that ended: grpc.aio raises CancelledError for both."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return error
    return EngineLost(_call_ended(stream, error))
