"""An engine in this process behind Triton's protocol: what `model.py` does, without a tritonserver.

For engines whose library is a fake of this process. What it sends has the datatype of the array that the engine made,
not the one that the contract wants, so the table of tensors sees the same faults as behind Triton.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.engine.contract import Tensor, encode_reply
from headrace.engine.engine import Engine
from headrace.engine.sink import StreamSink

DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "uint8": "UINT8", "object": "BYTES"}
_END = None


class _Responder:
    """`sink.Responder` over one stream of the server."""

    def __init__(self, out: queue.Queue[Any], context: Any, request_id: str) -> None:
        self._out = out
        self._context = context
        self._id = request_id

    def send(self, tensors: Sequence[Tensor], *, is_final: bool) -> None:
        message = service_pb2.ModelInferResponse(model_name="llm", id=self._id)
        message.parameters["triton_final_response"].bool_param = is_final
        for name, array in tensors:
            raw = array.tobytes()
            if array.dtype == np.object_:
                raw = b"".join(len(item).to_bytes(4, "little") + item for item in array)
            datatype = DATATYPES.get(str(array.dtype), str(array.dtype))
            message.outputs.add(name=name, datatype=datatype, shape=list(array.shape))
            message.raw_output_contents.append(raw)
        self._out.put(service_pb2.ModelStreamInferResponse(infer_response=message))

    def is_cancelled(self) -> bool:
        return not self._context.is_active()


class _Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        out: queue.Queue[Any] = queue.Queue()
        context.add_callback(lambda: out.put(_END))
        reader = ThreadPoolExecutor(1, "operations")
        reader.submit(self._read, requests, context, out)
        reader.shutdown(wait=False)
        while (message := out.get()) is not _END:
            yield message

    def _read(self, requests: Iterator[Any], context: Any, out: queue.Queue[Any]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for request in requests:
                inputs = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
                responder = _Responder(out, context, request.id)

                def open_sink(responder: _Responder = responder) -> StreamSink:
                    sink = StreamSink(responder)
                    sink.start()
                    return sink

                tokens = np.frombuffer(inputs.get("tokens", b""), "<i4").tolist()
                op, document = inputs["op"][4:], inputs.get("request", b"")[4:]
                reply = self._engine.handle(op, document, tokens, open_sink)
                if reply is not None:
                    responder.send(encode_reply(reply), is_final=True)


@contextlib.asynccontextmanager
async def hosted(engine: Engine) -> AsyncIterator[str]:
    """Serve a started engine; gives host:port, and stops the engine in the end."""
    pool = ThreadPoolExecutor(64, "hosted")
    server = grpc.server(pool)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Server(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.to_thread(engine.stop)
        await asyncio.to_thread(server.stop(0).wait)
        pool.shutdown(wait=False)
