import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_INVALID_REQUEST: _ClassVar[Reason]
    REASON_CONTEXT_LENGTH_EXCEEDED: _ClassVar[Reason]
    REASON_REQUEST_TOO_LARGE: _ClassVar[Reason]
    REASON_CHAT_TEMPLATE_MISSING: _ClassVar[Reason]
    REASON_EFFORT_UNSUPPORTED: _ClassVar[Reason]
    REASON_MODEL_NOT_FOUND: _ClassVar[Reason]
    REASON_NOT_FOUND: _ClassVar[Reason]
    REASON_ALREADY_EXISTS: _ClassVar[Reason]
    REASON_ETAG_MISMATCH: _ClassVar[Reason]
    REASON_MODEL_LOADING: _ClassVar[Reason]
    REASON_NO_HEALTHY_WORKER: _ClassVar[Reason]
    REASON_OVERLOADED: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]
    REASON_NO_SNAPSHOT: _ClassVar[Reason]
    REASON_STALE_EPOCH: _ClassVar[Reason]
    REASON_WORKER_LOST_BEFORE_OUTPUT: _ClassVar[Reason]
    REASON_STREAM_INTERRUPTED: _ClassVar[Reason]
    REASON_CLIENT_CANCELLED: _ClassVar[Reason]
    REASON_DEADLINE_EXCEEDED: _ClassVar[Reason]
    REASON_SLOW_CONSUMER: _ClassVar[Reason]
    REASON_ENGINE_FAILED: _ClassVar[Reason]
    REASON_SEQUENCE_GAP: _ClassVar[Reason]
    REASON_STORE_UNAVAILABLE: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_QUEUE_TIMEOUT: _ClassVar[Reason]
    REASON_EXECUTION_TIMEOUT: _ClassVar[Reason]
    REASON_CLIENT_DISCONNECTED: _ClassVar[Reason]
    REASON_NOT_RESUMABLE: _ClassVar[Reason]
    REASON_EVENTS_EXPIRED: _ClassVar[Reason]
    REASON_STREAM_TAKEN_OVER: _ClassVar[Reason]
    REASON_RESOURCE_IN_USE: _ClassVar[Reason]
    REASON_SNAPSHOT_TOO_OLD: _ClassVar[Reason]
    REASON_REVOKED: _ClassVar[Reason]
    REASON_UNAUTHENTICATED: _ClassVar[Reason]
    REASON_PERMISSION_DENIED: _ClassVar[Reason]
    REASON_QUOTA_EXCEEDED: _ClassVar[Reason]
    REASON_DEADLINE_UNMEETABLE: _ClassVar[Reason]
    REASON_IDEMPOTENCY_KEY_REUSED: _ClassVar[Reason]
    REASON_IDEMPOTENCY_ORIGIN_LOST: _ClassVar[Reason]
    REASON_IDEMPOTENCY_ORIGIN_UNREACHABLE: _ClassVar[Reason]
    REASON_GUIDED_DECODING_UNSUPPORTED: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_INVALID_REQUEST: Reason
REASON_CONTEXT_LENGTH_EXCEEDED: Reason
REASON_REQUEST_TOO_LARGE: Reason
REASON_CHAT_TEMPLATE_MISSING: Reason
REASON_EFFORT_UNSUPPORTED: Reason
REASON_MODEL_NOT_FOUND: Reason
REASON_NOT_FOUND: Reason
REASON_ALREADY_EXISTS: Reason
REASON_ETAG_MISMATCH: Reason
REASON_MODEL_LOADING: Reason
REASON_NO_HEALTHY_WORKER: Reason
REASON_OVERLOADED: Reason
REASON_DRAINING: Reason
REASON_NO_SNAPSHOT: Reason
REASON_STALE_EPOCH: Reason
REASON_WORKER_LOST_BEFORE_OUTPUT: Reason
REASON_STREAM_INTERRUPTED: Reason
REASON_CLIENT_CANCELLED: Reason
REASON_DEADLINE_EXCEEDED: Reason
REASON_SLOW_CONSUMER: Reason
REASON_ENGINE_FAILED: Reason
REASON_SEQUENCE_GAP: Reason
REASON_STORE_UNAVAILABLE: Reason
REASON_INTERNAL: Reason
REASON_QUEUE_TIMEOUT: Reason
REASON_EXECUTION_TIMEOUT: Reason
REASON_CLIENT_DISCONNECTED: Reason
REASON_NOT_RESUMABLE: Reason
REASON_EVENTS_EXPIRED: Reason
REASON_STREAM_TAKEN_OVER: Reason
REASON_RESOURCE_IN_USE: Reason
REASON_SNAPSHOT_TOO_OLD: Reason
REASON_REVOKED: Reason
REASON_UNAUTHENTICATED: Reason
REASON_PERMISSION_DENIED: Reason
REASON_QUOTA_EXCEEDED: Reason
REASON_DEADLINE_UNMEETABLE: Reason
REASON_IDEMPOTENCY_KEY_REUSED: Reason
REASON_IDEMPOTENCY_ORIGIN_LOST: Reason
REASON_IDEMPOTENCY_ORIGIN_UNREACHABLE: Reason
REASON_GUIDED_DECODING_UNSUPPORTED: Reason

class Error(_message.Message):
    __slots__ = ("reason", "message", "field", "metadata", "retry_delay")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    field: str
    metadata: _containers.ScalarMap[str, str]
    retry_delay: _duration_pb2.Duration
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
