"""The calls of the public API that a client makes, and their messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.inference.v1 import inference_service_pb2 as pb

_SERVICE = "/headrace.api.inference.v1.InferenceService"
GENERATE = f"{_SERVICE}/Generate"
GENERATE_INTERACTIVE = f"{_SERVICE}/GenerateInteractive"
RESUME_GENERATE = f"{_SERVICE}/ResumeGenerate"
GET_REQUEST = f"{_SERVICE}/GetRequest"
CANCEL_REQUEST = f"{_SERVICE}/CancelRequest"

END_S = 2.0
"""How long a client waits for a request's end to be confirmed once it has asked for it."""
ASK_S = 10.0
"""Deadline of GetRequest and CancelRequest."""

CANCEL_FRAME = pb.ClientFrame(cancel=pb.CancelFrame())


@dataclass(frozen=True, slots=True)
class Opening:
    """A call to make."""

    message: pb.GenerateRequest | pb.ResumeGenerateRequest
    timeout_s: float | None
    is_interactive: bool
    target: int
    """The number of the Router that it goes to."""

    @property
    def method(self) -> str:
        """Full name of the method."""
        if self.is_interactive:
            return GENERATE_INTERACTIVE
        return GENERATE if isinstance(self.message, pb.GenerateRequest) else RESUME_GENERATE

    @property
    def frame(self) -> pb.ClientFrame:
        """The first frame of the interactive form."""
        if isinstance(self.message, pb.GenerateRequest):
            return pb.ClientFrame(start=self.message)
        return pb.ClientFrame(resume=self.message)


class Unreadable:
    """A message that is no GenerateEvent."""


def read_event(data: bytes) -> pb.GenerateEvent | Unreadable:
    """Deserialize without failing: gRPC would log the error and, in one client only, end the call with INTERNAL."""
    try:
        return pb.GenerateEvent.FromString(data)
    except DecodeError:
        return Unreadable()


def acknowledgement(sequence: int) -> pb.ClientFrame:
    """Build the frame that confirms all events up to `sequence`."""
    return pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=sequence))


def serialize(message: Any) -> bytes:
    """Serialize any message."""
    data: bytes = message.SerializeToString()
    return data
