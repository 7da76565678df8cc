"""Triton's protobuf messages for our one model, and what its error strings mean.

On a stream Triton reports an error as a string and nothing else; its status code is lost. So every string that
it was seen to send is mapped here, once. The strings hold request ids and model names, no input.
"""

from __future__ import annotations

import enum
import re
from typing import Any

from tritonclient.grpc import service_pb2

from headrace.engine.contract import RawInput

MODEL = "llm"


class TritonFault(enum.Enum):
    """What a Triton error string means to us."""

    ENGINE_DEAD = "the engine's process is gone"
    UNLOADING = "Triton is unloading the model or shutting down"
    NOT_LOADED = "Triton has no model of that name"
    QUEUE_FULL = "Triton's own queue is full"
    QUEUE_TIMEOUT = "Triton's own queue took too long"
    INVALID = "Triton did not accept the request's form"
    INTERNAL = "Triton failed"

    @property
    def is_fatal(self) -> bool:
        """Whether nothing more can come of this engine."""
        return self in (TritonFault.ENGINE_DEAD, TritonFault.UNLOADING, TritonFault.NOT_LOADED)


# First match wins. Seen on 2.51 and in the sources up to 2.71.
_FAULTS: tuple[tuple[re.Pattern[str], TritonFault], ...] = tuple(
    (re.compile(pattern), fault)
    for pattern, fault in (
        (r"^Stub process .* is not healthy", TritonFault.ENGINE_DEAD),
        (r"unknown model: .* is not found", TritonFault.NOT_LOADED),
        (r"has no available versions", TritonFault.UNLOADING),
        (r"is not ready", TritonFault.UNLOADING),
        (r"shutting down and has stopped accepting", TritonFault.UNLOADING),
        (r"^Server exiting", TritonFault.UNLOADING),
        (r"Exceeds maximum queue size", TritonFault.QUEUE_FULL),
        (r"Request timeout expired", TritonFault.QUEUE_TIMEOUT),
        (r"expected number of inputs between", TritonFault.INVALID),
        (r"unexpected inference input", TritonFault.INVALID),
        (r"inference input .* data-type", TritonFault.INVALID),
        (r"parameter keys starting with 'triton_'", TritonFault.INVALID),
    )
)


def classify_error(message: str) -> TritonFault:
    """Map one of Triton's error strings; an unknown one is INTERNAL."""
    for pattern, fault in _FAULTS:
        if pattern.search(message):
            return fault
    return TritonFault.INTERNAL


def infer_request(request_id: str, inputs: list[RawInput]) -> Any:
    """Build a ModelInferRequest for the engine's model from the contract's encoded inputs."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, datatype, shape, raw in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request
