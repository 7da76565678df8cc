"""The resources of the control plane as frozen values, with their content-addressed identity.

The same as headrace.api.registry.v1, minus what only the wire needs. Sans-io; `hashlib` is arithmetic.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.control import names


class FileKind(enum.Enum):
    """What a file of an artifact is."""

    WEIGHTS = "weights"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    CHAT_TEMPLATE = "chat_template"
    OTHER = "other"
    SPECIAL_TOKENS = "special_tokens"
    ADAPTER = "adapter"
    QUANTIZATION = "quantization"
    PROCESSOR = "processor"


class Engine(enum.Enum):
    """Which engine runs a revision."""

    LLAMACPP = "llamacpp"
    SYNTHETIC = "synthetic"
    TENSORRT_LLM = "tensorrt_llm"
    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def schedules_itself(self) -> bool:
        """Whether it batches by itself and reads a Hugging Face folder, as the GPU engines do."""
        return self in (Engine.TENSORRT_LLM, Engine.VLLM, Engine.SGLANG)


class Abort(enum.Enum):
    """When an engine is asked to end a request before its end."""

    ON = "on"
    AFTER_FIRST_TOKEN = "after_first_token"  # noqa: S105
    OFF = "off"


class DraftMethod(enum.Enum):
    """Who drafts the tokens of speculative decoding."""

    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    EAGLE3 = "eagle3"

    @property
    def has_files(self) -> bool:
        """Whether an artifact of its own drafts."""
        return self is not DraftMethod.NGRAM


class Effort(enum.Enum):
    """How much a model reasons before it answers."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class ReplicaState(enum.Enum):
    """State of the worker behind a replica."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_LATER = {"later": True}
"""Of fields that came later: at their default they are not part of an identity, or every revision would change."""

Labels = tuple[tuple[str, str], ...]
"""Keys and values for people and their tools, ordered by key; never part of an identity."""


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """One file: path below the artifact's location ("/" between parts), bytes, SHA-256 in hex, kind."""

    path: str
    size: int
    sha256: str
    kind: FileKind


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's own files say of it; 0, "" or False where they are silent."""

    architecture: str = ""
    layers: int = 0
    heads: int = 0
    """Query heads of a layer."""
    kv_heads: int = 0
    embedding: int = 0
    """Width of the hidden state."""
    vocabulary: int = 0
    """Rows of the embedding."""
    context_tokens: int = 0
    """What the model was trained for."""
    weight_type: str = ""
    """Type or quantization of the weights, in lower case."""
    has_chat_template: bool = False
    base_digest: str = ""
    """For an adapter: digest of the artifact that it adapts."""
    tokenizer_vocabulary: int = 0
    """Tokens that the tokenizer's own files define."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A set of files that never changes."""

    files: tuple[ArtifactFile, ...]
    location: str
    """Directory that the Schedulers can read; not part of the identity."""
    create_time_ms: int = 0
    """Unix time, for people."""
    labels: Labels = field(default=(), metadata=_LATER)
    facts: ModelFacts = field(default=ModelFacts(), metadata=_LATER)
    """Not part of the identity, which the files themselves are."""
    signature: str = field(default="", metadata=_LATER)
    """Path below the location of a signature over the files; "" if there is none."""
    digest: str = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Derive the identity from the canonical manifest."""
        manifest = [[f.path, f.size, f.sha256, f.kind.value] for f in sorted(self.files, key=lambda f: f.path)]
        object.__setattr__(self, "digest", _digest(["headrace.artifact.v1", manifest]))
        object.__setattr__(self, "name", names.artifact(self.digest))

    def file_of(self, kind: FileKind) -> ArtifactFile | None:
        """The first file of that kind."""
        return next((f for f in self.files if f.kind is kind), None)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; None means not set. Meanings and ranges: headrace.api.inference.v1."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


NGRAM_MAX = 4
"""What an unset `ngram_max` means, tokens."""
GPU_MEMORY_FRACTION = 0.9
"""What an unset `gpu_memory_fraction` means."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding; headrace.api.registry.v1.Speculative."""

    method: DraftMethod | None
    """None is refused."""
    draft_tokens: int
    draft_artifact: str = ""
    """Name of the artifact that drafts; "" for NGRAM."""
    ngram_max: int = field(default=0, metadata=_LATER)
    """Longest run of tokens that NGRAM looks up; 0 for NGRAM_MAX, which becomes 0."""

    def __post_init__(self) -> None:
        """Give what means the same one spelling."""
        if self.ngram_max == NGRAM_MAX:
            object.__setattr__(self, "ngram_max", 0)


@dataclass(frozen=True, slots=True)
class Execution:
    """Which engine, and how it runs."""

    engine: Engine
    context_tokens: int
    slots: int
    kv_cells: int
    prefill_chunk: int = 128
    threads: int = 0
    synthetic_prefill_tokens_per_s: float = 0.0
    synthetic_decode_tokens_per_s: float = 0.0
    run_ahead_tokens: int = field(default=0, metadata=_LATER)
    """0: a sequence without credit is paused; above: see headrace.api.registry.v1.Execution."""
    tensor_parallel: int = field(default=0, metadata=_LATER)
    """GPUs that share each layer; 0 for one, which 1 becomes: one meaning has one identity."""
    pipeline_parallel: int = field(default=0, metadata=_LATER)
    """GPUs that share the layers; 0 for one, likewise."""
    device: str = field(default="", metadata=_LATER)
    """Device that it needs ("cuda-sm90"); "" for the CPU, which "cpu" becomes."""
    gpus: int = field(default=0, metadata=_LATER)
    """GPUs that one worker gets for itself; 0 for as many as share a layer, which that number becomes."""
    gpu_memory_fraction: float = field(default=0.0, metadata=_LATER)
    """Share of each GPU's memory that the engine may take; 0 for GPU_MEMORY_FRACTION, which becomes 0."""
    dtype: str = field(default="", metadata=_LATER)
    """Type that is computed in; "" for what the model's files say, which "auto" becomes."""
    kv_events: bool = field(default=False, metadata=_LATER)
    """Whether the engine tells what its prefix cache stores and removes."""
    abort: Abort | None = field(default=None, metadata=_LATER)
    """None: what is held for safe, which may differ from one release to another."""
    speculative: Speculative | None = field(default=None, metadata=_LATER)
    eager: bool = field(default=False, metadata=_LATER)
    """Without compilation and CUDA graphs."""

    def __post_init__(self) -> None:
        """Give what means the same one spelling."""
        spellings: dict[str, object] = {"tensor_parallel": 1, "pipeline_parallel": 1, "device": "cpu"}
        spellings |= {"gpus": self.tensor_parallel or 1, "gpu_memory_fraction": GPU_MEMORY_FRACTION, "dtype": "auto"}
        for name, spelling in spellings.items():
            if getattr(self, name) == spelling:
                object.__setattr__(self, name, type(spelling)())

    @property
    def gpus_needed(self) -> int:
        """GPUs that one worker gets for itself; 0 for an engine that runs on the CPU."""
        return (self.gpus or self.tensor_parallel or 1) if self.engine.schedules_itself and self.device else 0


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Bounds and defaults for requests to a revision."""

    max_output_tokens: int = 0
    default_sampling: Sampling = Sampling()
    supported_efforts: frozenset[Effort] = frozenset()
    default_effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    """Exactly what serves; content-addressed."""

    model: str
    """Id of the model it belongs to."""
    artifact: str
    """Name of the artifact; "" for the synthetic engine."""
    artifact_digest: str
    """Full digest of that artifact; part of the identity."""
    execution: Execution
    policy: RequestPolicy = RequestPolicy()
    create_time_ms: int = 0
    labels: Labels = field(default=(), metadata=_LATER)
    runtime: str = field(default="", metadata=_LATER)
    """The environment that it runs in, as a name that never means another one; "": what the Scheduler has."""
    policy_version: int = field(default=0, metadata=_LATER)
    """Version of the interface and of the request policy that it was made for."""
    digest: str = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Derive the identity from everything but the time and the labels."""
        content = [
            "headrace.revision.v1",
            self.model,
            self.artifact_digest,
            _plain(self.execution),
            _plain(self.policy),
        ]
        if self.runtime or self.policy_version:
            content.append({"runtime": self.runtime, "policy_version": self.policy_version})
        object.__setattr__(self, "digest", _digest(content))
        object.__setattr__(self, "name", names.revision(self.model, self.digest))

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Names of the artifacts that it needs: its own, and the one that drafts."""
        draft = self.execution.speculative.draft_artifact if self.execution.speculative is not None else ""
        return tuple(name for name in (self.artifact, draft) if name)


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """One revision behind an alias, with its share relative to the others."""

    revision: str
    weight: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that clients use."""

    name: str
    targets: tuple[AliasTarget, ...]
    etag: str = ""
    update_time_ms: int = 0
    labels: Labels = field(default=(), metadata=_LATER)
    last_good: tuple[AliasTarget, ...] = field(default=(), metadata=_LATER)
    """In snapshots: what was served before the alias moved, see headrace.control.last_good."""


@dataclass(frozen=True, slots=True)
class FailureDomain:
    """What fails together."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker's offer to serve a revision."""

    name: str
    revision: str
    scheduler: str
    endpoint: str
    """host:port of the Scheduler that owns it."""
    state: ReplicaState
    epoch: int
    """Fencing token; 0 until the store has given one."""
    slots: int = 0
    kv_cells: int = 0
    failure_domain: FailureDomain = FailureDomain()
    detail: str = ""
    guided: frozenset[str] = frozenset()
    """Kinds of guided decoding that its engine can do; headrace.control.guided."""


def _plain(value: object) -> object:
    """Turn frozen values into JSON with one spelling."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(str(_plain(v)) for v in value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {
            name: _plain(getattr(value, name))
            for name, described in sorted(value.__dataclass_fields__.items())
            if not (described.metadata.get("later") and getattr(value, name) == described.default)
        }
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_digest(values: Iterable[object]) -> str:
    """SHA-256 in hex of frozen values in the order given."""
    return _digest([_plain(v) for v in values])
