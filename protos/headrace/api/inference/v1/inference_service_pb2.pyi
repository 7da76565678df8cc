import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from headrace.api.errors.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnDisconnect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_DISCONNECT_UNSPECIFIED: _ClassVar[OnDisconnect]
    ON_DISCONNECT_CANCEL: _ClassVar[OnDisconnect]
    ON_DISCONNECT_CONTINUE: _ClassVar[OnDisconnect]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_SHEDDABLE: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]
    PRIORITY_STANDARD: _ClassVar[Priority]
    PRIORITY_CRITICAL: _ClassVar[Priority]

class Recovery(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECOVERY_UNSPECIFIED: _ClassVar[Recovery]
    RECOVERY_INTERRUPT: _ClassVar[Recovery]
    RECOVERY_CONTINUE: _ClassVar[Recovery]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]

class ReasoningEffort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASONING_EFFORT_UNSPECIFIED: _ClassVar[ReasoningEffort]
    REASONING_EFFORT_NONE: _ClassVar[ReasoningEffort]
    REASONING_EFFORT_LOW: _ClassVar[ReasoningEffort]
    REASONING_EFFORT_MEDIUM: _ClassVar[ReasoningEffort]
    REASONING_EFFORT_HIGH: _ClassVar[ReasoningEffort]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_FILTER: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE_EXCEEDED: _ClassVar[FinishReason]
    FINISH_REASON_SLOW_CONSUMER: _ClassVar[FinishReason]
    FINISH_REASON_INTERRUPTED: _ClassVar[FinishReason]
    FINISH_REASON_DRAINED: _ClassVar[FinishReason]
    FINISH_REASON_REJECTED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
ON_DISCONNECT_UNSPECIFIED: OnDisconnect
ON_DISCONNECT_CANCEL: OnDisconnect
ON_DISCONNECT_CONTINUE: OnDisconnect
PRIORITY_UNSPECIFIED: Priority
PRIORITY_SHEDDABLE: Priority
PRIORITY_BATCH: Priority
PRIORITY_STANDARD: Priority
PRIORITY_CRITICAL: Priority
RECOVERY_UNSPECIFIED: Recovery
RECOVERY_INTERRUPT: Recovery
RECOVERY_CONTINUE: Recovery
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
REASONING_EFFORT_UNSPECIFIED: ReasoningEffort
REASONING_EFFORT_NONE: ReasoningEffort
REASONING_EFFORT_LOW: ReasoningEffort
REASONING_EFFORT_MEDIUM: ReasoningEffort
REASONING_EFFORT_HIGH: ReasoningEffort
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTENT_FILTER: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE_EXCEEDED: FinishReason
FINISH_REASON_SLOW_CONSUMER: FinishReason
FINISH_REASON_INTERRUPTED: FinishReason
FINISH_REASON_DRAINED: FinishReason
FINISH_REASON_REJECTED: FinishReason
FINISH_REASON_FAILED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "conversation", "tokens", "max_tokens", "sampling", "stop", "top_logprobs", "reasoning_effort", "on_disconnect", "window_tokens", "priority", "idempotency_key", "recovery", "affinity_key", "guided_decoding")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_KEY_FIELD_NUMBER: _ClassVar[int]
    GUIDED_DECODING_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    conversation: Conversation
    tokens: TokenInput
    max_tokens: int
    sampling: SamplingParameters
    stop: StopConditions
    top_logprobs: int
    reasoning_effort: ReasoningEffort
    on_disconnect: OnDisconnect
    window_tokens: int
    priority: Priority
    idempotency_key: str
    recovery: Recovery
    affinity_key: str
    guided_decoding: GuidedDecoding
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., reasoning_effort: _Optional[_Union[ReasoningEffort, str]] = ..., on_disconnect: _Optional[_Union[OnDisconnect, str]] = ..., window_tokens: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., idempotency_key: _Optional[str] = ..., recovery: _Optional[_Union[Recovery, str]] = ..., affinity_key: _Optional[str] = ..., guided_decoding: _Optional[_Union[GuidedDecoding, _Mapping]] = ...) -> None: ...

class GuidedDecoding(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("strings",)
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, strings: _Optional[_Iterable[str]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: Role
    content: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[str] = ...) -> None: ...

class TokenInput(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("strings", "token_ids", "ignore_eos")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("start", "resume", "acknowledge", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: GenerateRequest
    resume: ResumeGenerateRequest
    acknowledge: Acknowledge
    cancel: CancelFrame
    def __init__(self, start: _Optional[_Union[GenerateRequest, _Mapping]] = ..., resume: _Optional[_Union[ResumeGenerateRequest, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., cancel: _Optional[_Union[CancelFrame, _Mapping]] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class CancelFrame(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeGenerateRequest(_message.Message):
    __slots__ = ("request", "after_sequence")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    request: str
    after_sequence: int
    def __init__(self, request: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("name", "state", "version", "revision", "replica", "attempts", "last_sequence", "attached", "finish_reason", "error", "usage", "timing", "receive_time", "attempt_records", "requested_effort", "default_effort", "effective_effort", "effective_priority")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Request.State]
        STATE_RECEIVED: _ClassVar[Request.State]
        STATE_QUEUED: _ClassVar[Request.State]
        STATE_PREFILL: _ClassVar[Request.State]
        STATE_DECODE: _ClassVar[Request.State]
        STATE_TERMINAL: _ClassVar[Request.State]
    STATE_UNSPECIFIED: Request.State
    STATE_RECEIVED: Request.State
    STATE_QUEUED: Request.State
    STATE_PREFILL: Request.State
    STATE_DECODE: Request.State
    STATE_TERMINAL: Request.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_RECORDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_EFFORT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EFFORT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_EFFORT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: Request.State
    version: int
    revision: str
    replica: str
    attempts: int
    last_sequence: int
    attached: bool
    finish_reason: FinishReason
    error: _errors_pb2.Error
    usage: Usage
    timing: Timing
    receive_time: _timestamp_pb2.Timestamp
    attempt_records: _containers.RepeatedCompositeFieldContainer[AttemptRecord]
    requested_effort: ReasoningEffort
    default_effort: ReasoningEffort
    effective_effort: ReasoningEffort
    effective_priority: Priority
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[Request.State, str]] = ..., version: _Optional[int] = ..., revision: _Optional[str] = ..., replica: _Optional[str] = ..., attempts: _Optional[int] = ..., last_sequence: _Optional[int] = ..., attached: _Optional[bool] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., receive_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt_records: _Optional[_Iterable[_Union[AttemptRecord, _Mapping]]] = ..., requested_effort: _Optional[_Union[ReasoningEffort, str]] = ..., default_effort: _Optional[_Union[ReasoningEffort, str]] = ..., effective_effort: _Optional[_Union[ReasoningEffort, str]] = ..., effective_priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("sequence", "request", "accepted", "delta", "notice", "terminal")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    request: str
    accepted: Accepted
    delta: Delta
    notice: Notice
    terminal: Terminal
    def __init__(self, sequence: _Optional[int] = ..., request: _Optional[str] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., terminal: _Optional[_Union[Terminal, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("revision", "replica", "attempt", "requested_effort", "default_effort", "effective_effort", "snapshot_version", "prompt_tokens", "cached_prompt_tokens", "window_tokens", "retention", "effective_priority")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_EFFORT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EFFORT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_EFFORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    revision: str
    replica: str
    attempt: int
    requested_effort: ReasoningEffort
    default_effort: ReasoningEffort
    effective_effort: ReasoningEffort
    snapshot_version: int
    prompt_tokens: int
    cached_prompt_tokens: int
    window_tokens: int
    retention: Retention
    effective_priority: Priority
    def __init__(self, revision: _Optional[str] = ..., replica: _Optional[str] = ..., attempt: _Optional[int] = ..., requested_effort: _Optional[_Union[ReasoningEffort, str]] = ..., default_effort: _Optional[_Union[ReasoningEffort, str]] = ..., effective_effort: _Optional[_Union[ReasoningEffort, str]] = ..., snapshot_version: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., window_tokens: _Optional[int] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., effective_priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("events_max", "bytes_max", "window")
    EVENTS_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    events_max: int
    bytes_max: int
    window: _duration_pb2.Duration
    def __init__(self, events_max: _Optional[int] = ..., bytes_max: _Optional[int] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "alternatives")
    class Alternative(_message.Message):
        __slots__ = ("token_id", "logprob")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        logprob: float
        def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    alternatives: _containers.RepeatedCompositeFieldContainer[TokenLogprob.Alternative]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[TokenLogprob.Alternative, _Mapping]]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "message", "attempt", "exactness")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Notice.Kind]
        KIND_RETRIED: _ClassVar[Notice.Kind]
        KIND_PAUSED: _ClassVar[Notice.Kind]
        KIND_DEGRADED: _ClassVar[Notice.Kind]
        KIND_CONTINUED: _ClassVar[Notice.Kind]
    KIND_UNSPECIFIED: Notice.Kind
    KIND_RETRIED: Notice.Kind
    KIND_PAUSED: Notice.Kind
    KIND_DEGRADED: Notice.Kind
    KIND_CONTINUED: Notice.Kind
    class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXACTNESS_UNSPECIFIED: _ClassVar[Notice.Exactness]
        EXACTNESS_EXACT: _ClassVar[Notice.Exactness]
        EXACTNESS_APPROXIMATE: _ClassVar[Notice.Exactness]
    EXACTNESS_UNSPECIFIED: Notice.Exactness
    EXACTNESS_EXACT: Notice.Exactness
    EXACTNESS_APPROXIMATE: Notice.Exactness
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    kind: Notice.Kind
    message: str
    attempt: int
    exactness: Notice.Exactness
    def __init__(self, kind: _Optional[_Union[Notice.Kind, str]] = ..., message: _Optional[str] = ..., attempt: _Optional[int] = ..., exactness: _Optional[_Union[Notice.Exactness, str]] = ...) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("finish_reason", "stop", "usage", "error", "attempts", "timing", "attempt_records")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_RECORDS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop: StopMatch
    usage: Usage
    error: _errors_pb2.Error
    attempts: int
    timing: Timing
    attempt_records: _containers.RepeatedCompositeFieldContainer[AttemptRecord]
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[_Union[StopMatch, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ..., attempts: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., attempt_records: _Optional[_Iterable[_Union[AttemptRecord, _Mapping]]] = ...) -> None: ...

class AttemptRecord(_message.Message):
    __slots__ = ("attempt", "replica", "cause", "finish_reason", "usage", "delivered")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[AttemptRecord.Cause]
        CAUSE_FIRST: _ClassVar[AttemptRecord.Cause]
        CAUSE_RETRY: _ClassVar[AttemptRecord.Cause]
        CAUSE_HEDGE: _ClassVar[AttemptRecord.Cause]
        CAUSE_CONTINUATION: _ClassVar[AttemptRecord.Cause]
    CAUSE_UNSPECIFIED: AttemptRecord.Cause
    CAUSE_FIRST: AttemptRecord.Cause
    CAUSE_RETRY: AttemptRecord.Cause
    CAUSE_HEDGE: AttemptRecord.Cause
    CAUSE_CONTINUATION: AttemptRecord.Cause
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    replica: str
    cause: AttemptRecord.Cause
    finish_reason: FinishReason
    usage: Usage
    delivered: bool
    def __init__(self, attempt: _Optional[int] = ..., replica: _Optional[str] = ..., cause: _Optional[_Union[AttemptRecord.Cause, str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., delivered: _Optional[bool] = ...) -> None: ...

class StopMatch(_message.Message):
    __slots__ = ("eos_token_id", "token_id", "string")
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STRING_FIELD_NUMBER: _ClassVar[int]
    eos_token_id: int
    token_id: int
    string: str
    def __init__(self, eos_token_id: _Optional[int] = ..., token_id: _Optional[int] = ..., string: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "proposed_tokens", "generated_tokens", "sent_tokens", "acknowledged_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    proposed_tokens: int
    generated_tokens: int
    sent_tokens: int
    acknowledged_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., sent_tokens: _Optional[int] = ..., acknowledged_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue", "time_to_first_token", "time_per_output_token", "total", "cancel_to_stopped", "cancel_to_freed")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TO_STOPPED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TO_FREED_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    time_per_output_token: _duration_pb2.Duration
    total: _duration_pb2.Duration
    cancel_to_stopped: _duration_pb2.Duration
    cancel_to_freed: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_per_output_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cancel_to_stopped: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cancel_to_freed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
