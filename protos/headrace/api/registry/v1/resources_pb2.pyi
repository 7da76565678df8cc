import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from headrace.api.inference.v1 import inference_service_pb2 as _inference_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Artifact(_message.Message):
    __slots__ = ("name", "digest", "files", "location", "create_time", "labels", "facts", "signature")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    files: _containers.RepeatedCompositeFieldContainer[ArtifactFile]
    location: str
    create_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    facts: ModelFacts
    signature: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., files: _Optional[_Iterable[_Union[ArtifactFile, _Mapping]]] = ..., location: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., facts: _Optional[_Union[ModelFacts, _Mapping]] = ..., signature: _Optional[str] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("architecture", "layers", "heads", "kv_heads", "embedding", "vocabulary", "context_tokens", "weight_type", "has_chat_template", "base_digest", "tokenizer_vocabulary")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TYPE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    embedding: int
    vocabulary: int
    context_tokens: int
    weight_type: str
    has_chat_template: bool
    base_digest: str
    tokenizer_vocabulary: int
    def __init__(self, architecture: _Optional[str] = ..., layers: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., embedding: _Optional[int] = ..., vocabulary: _Optional[int] = ..., context_tokens: _Optional[int] = ..., weight_type: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., base_digest: _Optional[str] = ..., tokenizer_vocabulary: _Optional[int] = ...) -> None: ...

class ArtifactFile(_message.Message):
    __slots__ = ("path", "size", "sha256", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ArtifactFile.Kind]
        KIND_WEIGHTS: _ClassVar[ArtifactFile.Kind]
        KIND_CONFIG: _ClassVar[ArtifactFile.Kind]
        KIND_TOKENIZER: _ClassVar[ArtifactFile.Kind]
        KIND_CHAT_TEMPLATE: _ClassVar[ArtifactFile.Kind]
        KIND_OTHER: _ClassVar[ArtifactFile.Kind]
        KIND_SPECIAL_TOKENS: _ClassVar[ArtifactFile.Kind]
        KIND_ADAPTER: _ClassVar[ArtifactFile.Kind]
        KIND_QUANTIZATION: _ClassVar[ArtifactFile.Kind]
        KIND_PROCESSOR: _ClassVar[ArtifactFile.Kind]
    KIND_UNSPECIFIED: ArtifactFile.Kind
    KIND_WEIGHTS: ArtifactFile.Kind
    KIND_CONFIG: ArtifactFile.Kind
    KIND_TOKENIZER: ArtifactFile.Kind
    KIND_CHAT_TEMPLATE: ArtifactFile.Kind
    KIND_OTHER: ArtifactFile.Kind
    KIND_SPECIAL_TOKENS: ArtifactFile.Kind
    KIND_ADAPTER: ArtifactFile.Kind
    KIND_QUANTIZATION: ArtifactFile.Kind
    KIND_PROCESSOR: ArtifactFile.Kind
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    sha256: str
    kind: ArtifactFile.Kind
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., kind: _Optional[_Union[ArtifactFile.Kind, str]] = ...) -> None: ...

class Revision(_message.Message):
    __slots__ = ("name", "digest", "artifact", "execution", "policy", "create_time", "labels", "runtime", "policy_version")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    artifact: str
    execution: Execution
    policy: RequestPolicy
    create_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    runtime: str
    policy_version: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., artifact: _Optional[str] = ..., execution: _Optional[_Union[Execution, _Mapping]] = ..., policy: _Optional[_Union[RequestPolicy, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., runtime: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class Execution(_message.Message):
    __slots__ = ("engine", "context_tokens", "slots", "kv_cells", "prefill_chunk", "threads", "synthetic_prefill_tokens_per_s", "synthetic_decode_tokens_per_s", "run_ahead_tokens", "tensor_parallel", "pipeline_parallel", "device", "gpus", "gpu_memory_fraction", "dtype", "kv_events", "abort", "speculative", "eager")
    class Abort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ABORT_UNSPECIFIED: _ClassVar[Execution.Abort]
        ABORT_ON: _ClassVar[Execution.Abort]
        ABORT_AFTER_FIRST_TOKEN: _ClassVar[Execution.Abort]
        ABORT_OFF: _ClassVar[Execution.Abort]
    ABORT_UNSPECIFIED: Execution.Abort
    ABORT_ON: Execution.Abort
    ABORT_AFTER_FIRST_TOKEN: Execution.Abort
    ABORT_OFF: Execution.Abort
    class Engine(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ENGINE_UNSPECIFIED: _ClassVar[Execution.Engine]
        ENGINE_LLAMACPP: _ClassVar[Execution.Engine]
        ENGINE_SYNTHETIC: _ClassVar[Execution.Engine]
        ENGINE_TENSORRT_LLM: _ClassVar[Execution.Engine]
        ENGINE_VLLM: _ClassVar[Execution.Engine]
        ENGINE_SGLANG: _ClassVar[Execution.Engine]
    ENGINE_UNSPECIFIED: Execution.Engine
    ENGINE_LLAMACPP: Execution.Engine
    ENGINE_SYNTHETIC: Execution.Engine
    ENGINE_TENSORRT_LLM: Execution.Engine
    ENGINE_VLLM: Execution.Engine
    ENGINE_SGLANG: Execution.Engine
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    EAGER_FIELD_NUMBER: _ClassVar[int]
    engine: Execution.Engine
    context_tokens: int
    slots: int
    kv_cells: int
    prefill_chunk: int
    threads: int
    synthetic_prefill_tokens_per_s: float
    synthetic_decode_tokens_per_s: float
    run_ahead_tokens: int
    tensor_parallel: int
    pipeline_parallel: int
    device: str
    gpus: int
    gpu_memory_fraction: float
    dtype: str
    kv_events: bool
    abort: Execution.Abort
    speculative: Speculative
    eager: bool
    def __init__(self, engine: _Optional[_Union[Execution.Engine, str]] = ..., context_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., kv_cells: _Optional[int] = ..., prefill_chunk: _Optional[int] = ..., threads: _Optional[int] = ..., synthetic_prefill_tokens_per_s: _Optional[float] = ..., synthetic_decode_tokens_per_s: _Optional[float] = ..., run_ahead_tokens: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., device: _Optional[str] = ..., gpus: _Optional[int] = ..., gpu_memory_fraction: _Optional[float] = ..., dtype: _Optional[str] = ..., kv_events: _Optional[bool] = ..., abort: _Optional[_Union[Execution.Abort, str]] = ..., speculative: _Optional[_Union[Speculative, _Mapping]] = ..., eager: _Optional[bool] = ...) -> None: ...

class Speculative(_message.Message):
    __slots__ = ("method", "draft_tokens", "draft_artifact", "ngram_max")
    class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        METHOD_UNSPECIFIED: _ClassVar[Speculative.Method]
        METHOD_NGRAM: _ClassVar[Speculative.Method]
        METHOD_DRAFT_MODEL: _ClassVar[Speculative.Method]
        METHOD_EAGLE3: _ClassVar[Speculative.Method]
    METHOD_UNSPECIFIED: Speculative.Method
    METHOD_NGRAM: Speculative.Method
    METHOD_DRAFT_MODEL: Speculative.Method
    METHOD_EAGLE3: Speculative.Method
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    NGRAM_MAX_FIELD_NUMBER: _ClassVar[int]
    method: Speculative.Method
    draft_tokens: int
    draft_artifact: str
    ngram_max: int
    def __init__(self, method: _Optional[_Union[Speculative.Method, str]] = ..., draft_tokens: _Optional[int] = ..., draft_artifact: _Optional[str] = ..., ngram_max: _Optional[int] = ...) -> None: ...

class RequestPolicy(_message.Message):
    __slots__ = ("max_output_tokens", "default_sampling", "supported_efforts", "default_effort")
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_EFFORTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EFFORT_FIELD_NUMBER: _ClassVar[int]
    max_output_tokens: int
    default_sampling: _inference_service_pb2.SamplingParameters
    supported_efforts: _containers.RepeatedScalarFieldContainer[_inference_service_pb2.ReasoningEffort]
    default_effort: _inference_service_pb2.ReasoningEffort
    def __init__(self, max_output_tokens: _Optional[int] = ..., default_sampling: _Optional[_Union[_inference_service_pb2.SamplingParameters, _Mapping]] = ..., supported_efforts: _Optional[_Iterable[_Union[_inference_service_pb2.ReasoningEffort, str]]] = ..., default_effort: _Optional[_Union[_inference_service_pb2.ReasoningEffort, str]] = ...) -> None: ...

class Alias(_message.Message):
    __slots__ = ("name", "targets", "etag", "update_time", "labels", "last_good")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LAST_GOOD_FIELD_NUMBER: _ClassVar[int]
    name: str
    targets: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    etag: str
    update_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    last_good: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    def __init__(self, name: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ..., etag: _Optional[str] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., last_good: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ...) -> None: ...

class AliasTarget(_message.Message):
    __slots__ = ("revision", "weight")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    revision: str
    weight: int
    def __init__(self, revision: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("name", "revision", "scheduler", "endpoint", "state", "epoch", "slots", "kv_cells", "failure_domain", "detail", "guided_decoding")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Replica.State]
        STATE_LOADING: _ClassVar[Replica.State]
        STATE_READY: _ClassVar[Replica.State]
        STATE_DRAINING: _ClassVar[Replica.State]
        STATE_FAILED: _ClassVar[Replica.State]
    STATE_UNSPECIFIED: Replica.State
    STATE_LOADING: Replica.State
    STATE_READY: Replica.State
    STATE_DRAINING: Replica.State
    STATE_FAILED: Replica.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GUIDED_DECODING_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    scheduler: str
    endpoint: str
    state: Replica.State
    epoch: int
    slots: int
    kv_cells: int
    failure_domain: FailureDomain
    detail: str
    guided_decoding: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., scheduler: _Optional[str] = ..., endpoint: _Optional[str] = ..., state: _Optional[_Union[Replica.State, str]] = ..., epoch: _Optional[int] = ..., slots: _Optional[int] = ..., kv_cells: _Optional[int] = ..., failure_domain: _Optional[_Union[FailureDomain, _Mapping]] = ..., detail: _Optional[str] = ..., guided_decoding: _Optional[_Iterable[str]] = ...) -> None: ...

class FailureDomain(_message.Message):
    __slots__ = ("host", "rack", "zone")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    host: str
    rack: str
    zone: str
    def __init__(self, host: _Optional[str] = ..., rack: _Optional[str] = ..., zone: _Optional[str] = ...) -> None: ...

class ServiceRecord(_message.Message):
    __slots__ = ("name", "endpoint", "version", "start_time", "snapshot_version", "snapshot_digest", "snapshot_refusal", "metrics_endpoint", "admin_endpoint", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    METRICS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    version: str
    start_time: _timestamp_pb2.Timestamp
    snapshot_version: int
    snapshot_digest: str
    snapshot_refusal: str
    metrics_endpoint: str
    admin_endpoint: str
    incarnation: str
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., snapshot_version: _Optional[int] = ..., snapshot_digest: _Optional[str] = ..., snapshot_refusal: _Optional[str] = ..., metrics_endpoint: _Optional[str] = ..., admin_endpoint: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "allowed_models", "requests_per_minute", "tokens_per_minute", "concurrency", "max_output_tokens", "default_priority", "priority_ceiling", "weight", "zones", "keys", "certificate_names", "etag", "update_time", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_MODELS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CEILING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NAMES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    allowed_models: _containers.RepeatedScalarFieldContainer[str]
    requests_per_minute: int
    tokens_per_minute: int
    concurrency: int
    max_output_tokens: int
    default_priority: _inference_service_pb2.Priority
    priority_ceiling: _inference_service_pb2.Priority
    weight: int
    zones: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedCompositeFieldContainer[ApiKey]
    certificate_names: _containers.RepeatedScalarFieldContainer[str]
    etag: str
    update_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., allowed_models: _Optional[_Iterable[str]] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrency: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., default_priority: _Optional[_Union[_inference_service_pb2.Priority, str]] = ..., priority_ceiling: _Optional[_Union[_inference_service_pb2.Priority, str]] = ..., weight: _Optional[int] = ..., zones: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[_Union[ApiKey, _Mapping]]] = ..., certificate_names: _Optional[_Iterable[str]] = ..., etag: _Optional[str] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ApiKey(_message.Message):
    __slots__ = ("name", "sha256", "create_time", "expire_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: bytes
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[bytes] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("name", "reason", "end_running", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    END_RUNNING_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    end_running: bool
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., end_running: _Optional[bool] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class AuditRecord(_message.Message):
    __slots__ = ("name", "time", "actor", "method", "resource", "before_json", "after_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_JSON_FIELD_NUMBER: _ClassVar[int]
    AFTER_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    time: _timestamp_pb2.Timestamp
    actor: str
    method: str
    resource: str
    before_json: str
    after_json: str
    def __init__(self, name: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., method: _Optional[str] = ..., resource: _Optional[str] = ..., before_json: _Optional[str] = ..., after_json: _Optional[str] = ...) -> None: ...
