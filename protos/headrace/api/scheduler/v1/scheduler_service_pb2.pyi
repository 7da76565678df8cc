import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.api.errors.v1 import errors_pb2 as _errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as _inference_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "dispatches", "credits", "cancels", "inventory_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    dispatches: _containers.RepeatedCompositeFieldContainer[Dispatch]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    inventory_request: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., dispatches: _Optional[_Iterable[_Union[Dispatch, _Mapping]]] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ..., inventory_request: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router", "incarnation")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router: str
    incarnation: str
    def __init__(self, router: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Dispatch(_message.Message):
    __slots__ = ("attempt", "request", "revision", "replica", "epoch", "generate", "remaining", "credit_limit", "output_tokens_max", "record_version", "queue_timeout", "execution_timeout", "tenant", "priority", "continuation", "cause", "effective_effort", "tenant_weight")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    CREDIT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_EFFORT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    request: str
    revision: str
    replica: str
    epoch: int
    generate: _inference_service_pb2.GenerateRequest
    remaining: _duration_pb2.Duration
    credit_limit: int
    output_tokens_max: int
    record_version: int
    queue_timeout: _duration_pb2.Duration
    execution_timeout: _duration_pb2.Duration
    tenant: str
    priority: _inference_service_pb2.Priority
    continuation: Continuation
    cause: _inference_service_pb2.AttemptRecord.Cause
    effective_effort: _inference_service_pb2.ReasoningEffort
    tenant_weight: int
    def __init__(self, attempt: _Optional[int] = ..., request: _Optional[str] = ..., revision: _Optional[str] = ..., replica: _Optional[str] = ..., epoch: _Optional[int] = ..., generate: _Optional[_Union[_inference_service_pb2.GenerateRequest, _Mapping]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., credit_limit: _Optional[int] = ..., output_tokens_max: _Optional[int] = ..., record_version: _Optional[int] = ..., queue_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., execution_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_inference_service_pb2.Priority, str]] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., cause: _Optional[_Union[_inference_service_pb2.AttemptRecord.Cause, str]] = ..., effective_effort: _Optional[_Union[_inference_service_pb2.ReasoningEffort, str]] = ..., tenant_weight: _Optional[int] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("token_ids", "text_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_bytes: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text_bytes: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("attempt", "limit")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    limit: int
    def __init__(self, attempt: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt", "cause")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    cause: _inference_service_pb2.FinishReason
    def __init__(self, attempt: _Optional[int] = ..., cause: _Optional[_Union[_inference_service_pb2.FinishReason, str]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "admitted", "deltas", "ended", "load", "inventory")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    deltas: Deltas
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    load: LoadReport
    inventory: Inventory
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., deltas: _Optional[_Union[Deltas, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("number", "attempts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("scheduler", "incarnation")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    scheduler: str
    incarnation: str
    def __init__(self, scheduler: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("attempt", "prompt_tokens", "cached_prompt_tokens", "record_version")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prompt_tokens: int
    cached_prompt_tokens: int
    record_version: int
    def __init__(self, attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., record_version: _Optional[int] = ...) -> None: ...

class Deltas(_message.Message):
    __slots__ = ("attempts", "token_counts", "token_ids", "text_lengths", "text", "logprobs", "top_counts", "top_ids", "top_logprobs")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_lengths: _containers.RepeatedScalarFieldContainer[int]
    text: bytes
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempts: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., text_lengths: _Optional[_Iterable[int]] = ..., text: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("attempt", "reason", "stop", "usage", "error", "queue", "record_version", "release", "output_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    reason: _inference_service_pb2.FinishReason
    stop: _inference_service_pb2.StopMatch
    usage: _inference_service_pb2.Usage
    error: _errors_pb2.Error
    queue: _duration_pb2.Duration
    record_version: int
    release: _duration_pb2.Duration
    output_tokens: int
    def __init__(self, attempt: _Optional[int] = ..., reason: _Optional[_Union[_inference_service_pb2.FinishReason, str]] = ..., stop: _Optional[_Union[_inference_service_pb2.StopMatch, _Mapping]] = ..., usage: _Optional[_Union[_inference_service_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ..., queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., record_version: _Optional[int] = ..., release: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("replicas", "routers", "successes", "extra_attempts")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    routers: int
    successes: int
    extra_attempts: int
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ..., routers: _Optional[int] = ..., successes: _Optional[int] = ..., extra_attempts: _Optional[int] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("replica", "active", "waiting", "slots", "kv_cells_reserved", "kv_cells", "queue_wait", "waiting_tokens", "concurrency_limit", "admits_from", "prefill_tokens_per_second", "waiting_max", "kv_tokens_stored", "kv_tokens_removed", "room", "closed")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FROM_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WAITING_MAX_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_STORED_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    active: int
    waiting: int
    slots: int
    kv_cells_reserved: int
    kv_cells: int
    queue_wait: _duration_pb2.Duration
    waiting_tokens: int
    concurrency_limit: int
    admits_from: _inference_service_pb2.Priority
    prefill_tokens_per_second: int
    waiting_max: int
    kv_tokens_stored: int
    kv_tokens_removed: int
    room: int
    closed: _containers.RepeatedCompositeFieldContainer[ClosedDoor]
    def __init__(self, replica: _Optional[str] = ..., active: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[int] = ..., kv_cells_reserved: _Optional[int] = ..., kv_cells: _Optional[int] = ..., queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting_tokens: _Optional[int] = ..., concurrency_limit: _Optional[int] = ..., admits_from: _Optional[_Union[_inference_service_pb2.Priority, str]] = ..., prefill_tokens_per_second: _Optional[int] = ..., waiting_max: _Optional[int] = ..., kv_tokens_stored: _Optional[int] = ..., kv_tokens_removed: _Optional[int] = ..., room: _Optional[int] = ..., closed: _Optional[_Iterable[_Union[ClosedDoor, _Mapping]]] = ...) -> None: ...

class ClosedDoor(_message.Message):
    __slots__ = ("tenant", "priority", "tokens", "wait", "done")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    priority: _inference_service_pb2.Priority
    tokens: int
    wait: _duration_pb2.Duration
    done: _duration_pb2.Duration
    def __init__(self, tenant: _Optional[str] = ..., priority: _Optional[_Union[_inference_service_pb2.Priority, str]] = ..., tokens: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., done: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("scheduler", "workers", "attempts", "sessions", "lease", "lease_age", "orphans_cancelled", "attempts_unknown")
    class Lease(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEASE_UNSPECIFIED: _ClassVar[GetStateResponse.Lease]
        LEASE_HELD: _ClassVar[GetStateResponse.Lease]
        LEASE_UNCERTAIN: _ClassVar[GetStateResponse.Lease]
        LEASE_LOST: _ClassVar[GetStateResponse.Lease]
    LEASE_UNSPECIFIED: GetStateResponse.Lease
    LEASE_HELD: GetStateResponse.Lease
    LEASE_UNCERTAIN: GetStateResponse.Lease
    LEASE_LOST: GetStateResponse.Lease
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    scheduler: str
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    attempts: int
    sessions: int
    lease: GetStateResponse.Lease
    lease_age: _duration_pb2.Duration
    orphans_cancelled: int
    attempts_unknown: int
    def __init__(self, scheduler: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., attempts: _Optional[int] = ..., sessions: _Optional[int] = ..., lease: _Optional[_Union[GetStateResponse.Lease, str]] = ..., lease_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., orphans_cancelled: _Optional[int] = ..., attempts_unknown: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("replica", "revision", "state", "detail", "restarts", "engine_json", "pid", "started", "alive", "ready", "heard_ago", "memory_bytes", "crash_loop")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Worker.State]
        STATE_CREATED: _ClassVar[Worker.State]
        STATE_LOADING: _ClassVar[Worker.State]
        STATE_WARMING: _ClassVar[Worker.State]
        STATE_READY: _ClassVar[Worker.State]
        STATE_DRAINING: _ClassVar[Worker.State]
        STATE_STOPPED: _ClassVar[Worker.State]
        STATE_FAILED: _ClassVar[Worker.State]
    STATE_UNSPECIFIED: Worker.State
    STATE_CREATED: Worker.State
    STATE_LOADING: Worker.State
    STATE_WARMING: Worker.State
    STATE_READY: Worker.State
    STATE_DRAINING: Worker.State
    STATE_STOPPED: Worker.State
    STATE_FAILED: Worker.State
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRASH_LOOP_FIELD_NUMBER: _ClassVar[int]
    replica: str
    revision: str
    state: Worker.State
    detail: str
    restarts: int
    engine_json: str
    pid: int
    started: bool
    alive: bool
    ready: bool
    heard_ago: _duration_pb2.Duration
    memory_bytes: int
    crash_loop: bool
    def __init__(self, replica: _Optional[str] = ..., revision: _Optional[str] = ..., state: _Optional[_Union[Worker.State, str]] = ..., detail: _Optional[str] = ..., restarts: _Optional[int] = ..., engine_json: _Optional[str] = ..., pid: _Optional[int] = ..., started: _Optional[bool] = ..., alive: _Optional[bool] = ..., ready: _Optional[bool] = ..., heard_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., crash_loop: _Optional[bool] = ...) -> None: ...
