"""Asks an engine itself, past the Scheduler: the `stats` operation of its Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.engine.contract import Reply, decode_response, encode_op
from support.stack import RunningStack


def workers(stack: RunningStack) -> dict[str, scheduler_pb2.Worker]:
    """The Scheduler's workers, by the model in their revision's name."""
    with grpc.insecure_channel(stack.scheduler) as channel:
        state = SchedulerServiceStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
    return {worker.revision.split("/")[1]: worker for worker in state.workers}


def engine_stats(stack: RunningStack, model: str) -> dict[str, Any]:
    """The engine's own statistics."""
    arguments = Path(f"/proc/{workers(stack)[model].pid}/cmdline").read_text().split("\0")
    port = next(a.partition("=")[2] for a in arguments if a.startswith("--grpc-port="))
    request = service_pb2.ModelInferRequest(model_name="llm", id="stats")
    for name, datatype, shape, raw in encode_op("stats", {}, ()):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for message in stub.ModelStreamInfer(iter([request]), timeout=10):
            reply = decode_response(message.infer_response)
            assert isinstance(reply, Reply)
            assert reply.ok, reply.document
            return dict(reply.document["stats"])
    raise AssertionError("no answer")
