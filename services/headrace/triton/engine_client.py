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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.engine.contract import Reply, StepBatch, WireError, decode_response, encode_op
from headrace.rpc.channels import KEEPALIVE
from headrace.triton.wire import MODEL, classify_error, infer_request

SILENCE_MAX_S = 3.0
RECEIPT_MAX_S = 5.0
OPERATIONS_OUT_MAX = 8
"""Operations without a receipt; more wait and are merged meanwhile."""
GENERATES_PER_OPERATION = 64
GENERATE_BYTES_MAX = 4 * 1024 * 1024
"""Input after which no further REQUEST joins an operation; one alone may be larger."""
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


class EngineLost(Exception):
    """The engine, or the way to it, is gone; the message is a sentence for an operator."""


class EngineSink(Protocol):
    """Told, in the event loop and without waiting, what the engine says."""

    def on_batch(self, batch: StepBatch) -> None:
        """One response of the event stream."""

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        """A whole `generate` was refused; `error` is an ERROR of the contract."""


@dataclass(slots=True)
class _Receipt:
    """An operation that has no answer yet."""

    answered: asyncio.Future[dict[str, Any]] | None
    due_at: float
    seqs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Generate:
    """A REQUEST that waits to be sent."""

    request: Mapping[str, Any]
    tokens: Sequence[int]
    input_bytes: int


class EngineClient:
    """One engine behind one Triton. Belongs to one event loop; used once: open, run, close."""

    def __init__(self, target: str, *, owner: str, sink: EngineSink) -> None:
        self.target = target
        self.hello: Mapping[str, Any] = {}
        """The engine's own description, from the hello event."""
        self.stats: Mapping[str, Any] = {}
        """The newest statistics that came with an `alive` event."""
        self.messages = 0
        """Responses read from the event stream."""
        self._owner = owner
        self._sink = sink
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._events: Any = None
        self._operations: Any = None
        self._ids = itertools.count(1)
        self._generates: deque[_Generate] = deque()
        self._credits: dict[int, int] = {}
        self._cancels: dict[str, list[int]] = {}
        self._calls: list[tuple[str, asyncio.Future[dict[str, Any]]]] = []
        self._receipts: dict[str, _Receipt] = {}
        self._work = asyncio.Event()
        self._heard = False

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
        self._events = self._stub.ModelStreamInfer()
        self._operations = self._stub.ModelStreamInfer()
        try:
            async with asyncio.timeout(timeout_s):
                await self._events.write(infer_request("events", encode_op("events", {"owner": self._owner})))
                batch = self._batch(await self._events.read())
        except TimeoutError:
            raise EngineLost(f"the engine did not say hello within {timeout_s:g} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise EngineLost(_call_ended("event", error)) from None
        if batch is None or not batch.events or batch.events[0].get("type") != "hello":
            raise EngineLost("the engine's first event is not a hello")
        hello = batch.events[0]
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
        for call in (self._events, self._operations):
            if call is not None:
                call.cancel()
        await self._channel.close()

    # Operations. None of them waits; their outcome is told by events.

    def generate(self, request: Mapping[str, Any], tokens: Sequence[int] = (), *, input_bytes: int = 0) -> None:
        """Submit one REQUEST; `tokens` are its prompt's ids when it says `prompt_tokens`."""
        self._generates.append(_Generate(request, tokens, input_bytes))
        self._work.set()

    def credit(self, seq: int, limit: int) -> None:
        """Raise the limit of a sequence."""
        if limit > self._credits.get(seq, -1):
            self._credits[seq] = limit
            self._work.set()

    def cancel(self, seqs: Sequence[int], reason: str = "cancelled") -> None:
        """End sequences between two steps; their `finished` event confirms it."""
        self._cancels.setdefault(reason, []).extend(seqs)
        self._work.set()

    async def ping(self, timeout_s: float = RECEIPT_MAX_S) -> Mapping[str, Any]:
        """Ask the engine's loop for its statistics; `run` must be running.

        Raises:
            EngineLost: no answer in time.
        """
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls.append(("ping", answered))
        self._work.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise EngineLost(f"the engine did not answer a ping within {timeout_s:g} s") from None

    # Reading

    def _batch(self, response: Any) -> StepBatch | None:
        """Decode one message of the event stream; None at its end."""
        if response is grpc.aio.EOF:
            return None
        if response.error_message:
            raise EngineLost(f"{classify_error(response.error_message).value}: the event stream was refused")
        try:
            batch = decode_response(response.infer_response)
        except WireError as error:
            raise EngineLost(f"the engine broke its contract: {error}") from None
        if not isinstance(batch, StepBatch):
            reason = batch.error.get("message", "no reason given")
            raise EngineLost(f"the engine refused the event stream: {reason}")
        return batch

    async def _read_events(self) -> None:
        sink, number = self._sink, 1  # open() has read the first one
        try:
            while (batch := self._batch(await self._events.read())) is not None:
                self.messages += 1
                self._heard = True
                if batch.final:
                    raise EngineLost("the engine ended the event stream: it stops, or another Scheduler took it over")
                number += 1
                if batch.number != number:
                    raise EngineLost(f"the event stream has a gap: message {batch.number} came instead of {number}")
                for event in batch.events:
                    if event.get("type") == "alive":
                        self.stats = event.get("stats", self.stats)
                sink.on_batch(batch)
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
                    operation = self._next_operation()
                    if operation is None:
                        break
                    await self._operations.write(operation)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise _lost_or_cancelled("operation", error) from None

    def _next_operation(self) -> Any:
        """Take what waits longest in effect: sequences before their credits and cancels."""
        if self._generates:
            return self._next_generate()
        if self._credits:
            limits, self._credits = self._credits, {}
            return self._encode("credit", {"limits": list(limits.items())})
        if self._cancels:
            reason, seqs_to_end = self._cancels.popitem()
            return self._encode("cancel", {"seqs": seqs_to_end, "reason": reason})
        if self._calls:
            op, answered = self._calls.pop(0)
            return self._encode(op, None, answered=answered)
        return None

    def _next_generate(self) -> Any:
        batch: list[_Generate] = []
        size = 0
        while self._generates and len(batch) < GENERATES_PER_OPERATION:
            size += self._generates[0].input_bytes
            if batch and size > GENERATE_BYTES_MAX:
                break
            batch.append(self._generates.popleft())
        tokens = [token for generate in batch for token in generate.tokens]
        requests = [generate.request for generate in batch]
        return self._encode(
            "generate", {"requests": requests}, tokens, seqs=tuple(int(request["seq"]) for request in requests)
        )

    def _encode(
        self,
        op: str,
        document: Mapping[str, Any] | None,
        tokens: Sequence[int] = (),
        *,
        seqs: tuple[int, ...] = (),
        answered: asyncio.Future[dict[str, Any]] | None = None,
    ) -> Any:
        name = f"{op}-{next(self._ids)}"
        due_at = asyncio.get_running_loop().time() + RECEIPT_MAX_S
        self._receipts[name] = _Receipt(answered, due_at, seqs)
        return infer_request(name, encode_op(op, document, tokens))

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
            if silent * _WATCH_S >= SILENCE_MAX_S:
                raise EngineLost(f"the engine was silent for {SILENCE_MAX_S:g} s")
            oldest = next(iter(self._receipts.values()), None)  # entered in the order of their due times
            is_late = oldest is not None and asyncio.get_running_loop().time() > oldest.due_at
            overdue = overdue + 1 if is_late else 0
            if overdue >= 2:
                raise EngineLost(f"the engine did not take an operation within {RECEIPT_MAX_S:g} s")

    def _abandon(self) -> None:
        waiting = [answered for _, answered in self._calls]
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
