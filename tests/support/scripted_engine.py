"""An engine that says what a test wants, behind a real gRPC server that speaks Triton's protocol.

async with scripted_engine() as engine:      engine.target is what a Scheduler attaches to
    await engine.tell({"type": "admitted", ...})
    engine.asked("cancel")                   the documents of the operations that came

It is alive until told otherwise, and declares no shapes; `identity` adds to what its hello says of it. `swallow` names
operations that get their receipt and have no effect, `hold` those without even a receipt until `release` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.engine.contract import COLUMNS, CONTRACT, StepBatch, encode_reply, encode_step

REVISION = "models/scripted/revisions/0123456789ab"


def response(tensors: Iterable[tuple[str, Any]], *, request_id: str = "", final: bool = False) -> Any:
    """A message of Triton's stream."""
    message = service_pb2.ModelInferResponse(model_name="llm", id=request_id)
    message.parameters["triton_final_response"].bool_param = final
    for name, array in tensors:
        datatype = COLUMNS[name][0] if name in COLUMNS else "BYTES"
        raw = array.tobytes()
        if array.dtype == np.object_:
            raw = b"".join(len(item).to_bytes(4, "little") + item for item in array)
        message.outputs.add(name=name, datatype=datatype, shape=list(array.shape))
        message.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=message)


class ScriptedEngine(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server's side of one engine. `streams` counts the event streams that were opened."""

    def __init__(self, *, slots: int = 4, first_number: int = 1, **identity: Any) -> None:
        self.target = ""
        self.streams = 0
        self.swallow: frozenset[str] = frozenset()
        self.hold: frozenset[str] = frozenset()
        self.release = asyncio.Event()
        self.is_mute = False
        """Whether it says nothing of itself, as one does that is in a long step."""
        self._slots = slots
        self._identity = identity
        self._first_number = first_number
        self._number = 0
        self._events: Any = None
        self._writing = asyncio.Lock()
        self._operations: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()

    def asked(self, op: str) -> list[dict[str, Any]]:
        """The documents of the operations of that name."""
        return [document for name, document in self._operations if name == op]

    async def until(self, condition: Any, timeout_s: float = 10) -> None:
        """Wait until `condition()` holds, looking after each operation."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def tell(self, *events: dict[str, Any], skip: int = 0, **columns: Any) -> None:
        """Write one response of the event stream; `skip` leaves numbers out."""
        async with self._writing:  # numbers in the order of the writes, whoever else writes
            self._number += 1 + skip
            batch = StepBatch(number=self._number, steps=1, events=list(events), **columns)
            await self._events.write(response(encode_step(batch)))

    async def say(self, seq: int, *token_ids: int) -> None:
        """Write output of one sequence, a letter a token."""
        count = len(token_ids)
        await self.tell(
            seqs=[seq], token_counts=[count], token_ids=list(token_ids), text_lengths=[count], text=b"x" * count
        )

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        async for request in requests:
            inputs = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
            op = inputs["op"][4:].decode()
            document = json.loads(inputs["request"][4:]) if "request" in inputs else {}
            if op == "events":
                await self._open(context)
            else:
                self._operations.append((op, document))
                self._news.set()
                if op in self.hold:
                    await self.release.wait()
                await context.write(response(encode_reply({"ok": True}), request_id=request.id, final=True))
                if op == "cancel" and op not in self.swallow:
                    for seq in document["seqs"]:
                        await self.tell(finished(seq, document["reason"]))

    async def _open(self, context: Any) -> None:
        self.streams += 1
        self._events = context
        self._number = self._first_number - 1
        identity = {
            "revision": REVISION,
            "slots": self._slots,
            "kv_cells": 1000,
            "context_tokens": 100,
            **self._identity,
        }
        await self.tell({"type": "hello", "contract": CONTRACT, "engine": identity, "incarnation": str(self.streams)})

    async def live(self) -> None:
        """Say so, twice a second."""
        while True:
            await asyncio.sleep(0.5)
            if self._events is not None and not self.is_mute:
                with contextlib.suppress(Exception):
                    await self.tell({"type": "alive", "stats": {}})


def admitted(seq: int, prompt_tokens: int = 5) -> dict[str, Any]:
    """An `admitted` event."""
    return {"type": "admitted", "seq": seq, "prompt_tokens": prompt_tokens, "cached_tokens": 0}


def finished(seq: int, reason: str, *, emitted: int = 0, stopped_ago_s: float = 0.0) -> dict[str, Any]:
    """A `finished` event."""
    return {
        "type": "finished",
        "seq": seq,
        "reason": reason,
        "stop": None,
        "usage": {"prompt": 5, "cached": 0, "generated": emitted + 1, "emitted": emitted},
        "timing_ns": {"stopped": time.monotonic_ns() - round(stopped_ago_s * 1e9)},
        "error": None,
    }


@contextlib.asynccontextmanager
async def scripted_engine(**options: Any) -> AsyncIterator[ScriptedEngine]:
    """Serve one on loopback."""
    engine = ScriptedEngine(**options)
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(engine, server)
    engine.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    living = asyncio.create_task(engine.live())
    try:
        yield engine
    finally:
        engine.release.set()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await server.stop(0)
