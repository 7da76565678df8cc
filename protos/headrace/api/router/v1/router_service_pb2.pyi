import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.api.inference.v1 import inference_service_pb2 as _inference_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRouteRequest(_message.Message):
    __slots__ = ("generate", "tenant")
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    generate: _inference_service_pb2.GenerateRequest
    tenant: str
    def __init__(self, generate: _Optional[_Union[_inference_service_pb2.GenerateRequest, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainRouteResponse(_message.Message):
    __slots__ = ("revision", "snapshot_version", "chosen", "candidates", "candidates_total", "refusal")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    revision: str
    snapshot_version: int
    chosen: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    candidates_total: int
    refusal: str
    def __init__(self, revision: _Optional[str] = ..., snapshot_version: _Optional[int] = ..., chosen: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., candidates_total: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("replica", "excluded_by", "score", "parts", "in_flight", "load_age", "failure_domain")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    replica: str
    excluded_by: str
    score: float
    parts: _containers.RepeatedCompositeFieldContainer[ScorePart]
    in_flight: int
    load_age: _duration_pb2.Duration
    failure_domain: str
    def __init__(self, replica: _Optional[str] = ..., excluded_by: _Optional[str] = ..., score: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[ScorePart, _Mapping]]] = ..., in_flight: _Optional[int] = ..., load_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failure_domain: _Optional[str] = ...) -> None: ...

class ScorePart(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class RelayRequestRequest(_message.Message):
    __slots__ = ("request", "tenant", "after_sequence", "incarnation", "cancel")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    request: str
    tenant: str
    after_sequence: int
    incarnation: str
    cancel: bool
    def __init__(self, request: _Optional[str] = ..., tenant: _Optional[str] = ..., after_sequence: _Optional[int] = ..., incarnation: _Optional[str] = ..., cancel: _Optional[bool] = ...) -> None: ...

class RelayRequestResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: bytes
    def __init__(self, event: _Optional[bytes] = ...) -> None: ...

class LookUpRequestRequest(_message.Message):
    __slots__ = ("request", "tenant", "incarnation", "cancel")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    request: str
    tenant: str
    incarnation: str
    cancel: bool
    def __init__(self, request: _Optional[str] = ..., tenant: _Optional[str] = ..., incarnation: _Optional[str] = ..., cancel: _Optional[bool] = ...) -> None: ...

class LookUpRequestResponse(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_service_pb2.Request
    def __init__(self, request: _Optional[_Union[_inference_service_pb2.Request, _Mapping]] = ...) -> None: ...

class ResumeRequestRequest(_message.Message):
    __slots__ = ("resume", "acknowledge", "cancel")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    resume: Resumption
    acknowledge: _inference_service_pb2.Acknowledge
    cancel: _inference_service_pb2.CancelFrame
    def __init__(self, resume: _Optional[_Union[Resumption, _Mapping]] = ..., acknowledge: _Optional[_Union[_inference_service_pb2.Acknowledge, _Mapping]] = ..., cancel: _Optional[_Union[_inference_service_pb2.CancelFrame, _Mapping]] = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("request", "tenant", "incarnation", "after_sequence", "interactive")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INTERACTIVE_FIELD_NUMBER: _ClassVar[int]
    request: str
    tenant: str
    incarnation: str
    after_sequence: int
    interactive: bool
    def __init__(self, request: _Optional[str] = ..., tenant: _Optional[str] = ..., incarnation: _Optional[str] = ..., after_sequence: _Optional[int] = ..., interactive: _Optional[bool] = ...) -> None: ...

class ResumeRequestResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: bytes
    def __init__(self, event: _Optional[bytes] = ...) -> None: ...
