"""Does a model run as a revision says? Answered before anything is stored or loaded, with all reasons at once.

    facts of the files + execution + device -> reasons why not, each with the field at fault

What the files do not say (0 or "") is not checked. Sans-io.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.control import engine_settings, manifest
from headrace.control.errors import Violation
from headrace.control.resources import Artifact, Engine, Execution, FileKind, ModelFacts

_CUDA = re.compile(r"cuda-sm([1-9][0-9]{1,2})")

_LLAMACPP = (
    "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q2_k_s q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k "
    "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq2_m iq3_xxs iq3_xs iq3_s iq3_m iq4_nl iq4_xs tq1_0 tq2_0 mxfp4"
)
LLAMACPP_TYPES = frozenset(_LLAMACPP.split())
"""What llama.cpp 0.3.36's CPU kernels run; the types that it has dropped (q4_2, q4_0_4_4) are not among them."""

# Types of weights -> compute capabilities (from, to) that run them without falling back to another type.
# Conservative: native support, or kernels that the big engines have shipped for years (Marlin for AWQ and GPTQ).
CUDA_TYPES: dict[str, tuple[int, int]] = {
    "f32": (50, 999),
    "f16": (60, 999),  # full rate since Pascal
    "bf16": (80, 999),  # Ampere has it first
    "int8": (75, 90),  # integer tensor cores; engines have no kernels for Blackwell
    "int-quantized": (75, 90),
    "awq": (75, 999),
    "gptq": (75, 999),
    "pack-quantized": (80, 999),  # compressed-tensors' own int4 packing, by Marlin
    "bnb": (75, 999),
    "fp8": (89, 999),  # Ada and Hopper; before them only as storage
    "float-quantized": (89, 999),
    "mxfp4": (90, 999),
    "nvfp4": (100, 999),  # Blackwell's tensor cores
    "nvfp4-pack-quantized": (100, 999),
}


@dataclass(frozen=True, slots=True)
class Device:
    """What computes: "cpu", or "cuda" with its compute capability times ten (90: Hopper)."""

    kind: str = "cpu"
    capability: int = 0

    def __str__(self) -> str:
        return f"cuda-sm{self.capability}" if self.kind == "cuda" else self.kind

    def runs(self, weight_type: str) -> bool:
        """Whether there are kernels for weights of that type."""
        if self.kind == "cpu":
            return weight_type in LLAMACPP_TYPES
        lowest, highest = CUDA_TYPES.get(weight_type, (1000, 0))
        return lowest <= self.capability <= highest


def device(text: str) -> Device | None:
    """The device of that name; None if there is none of it."""
    if text in ("", "cpu"):
        return Device()
    match = _CUDA.fullmatch(text)
    return Device("cuda", int(match[1])) if match else None


def incompatibilities(
    artifact: Artifact | None, execution: Execution, draft: Artifact | None = None
) -> tuple[Violation, ...]:
    """Every reason why `artifact` cannot run so; fields are paths in a Revision.

    Args:
        artifact: None for an engine that needs no files.
        execution: as asked for.
        draft: what `execution.speculative.draft_artifact` names; None where that is not known here.
    """
    place = device(execution.device)
    reasons = []
    if place is None:
        reasons.append(Violation("execution.device", "must be cpu, or cuda-sm with a compute capability (cuda-sm90)"))
    if execution.engine is Engine.LLAMACPP:
        reasons += _llamacpp(artifact, execution)
    if execution.engine.schedules_itself:
        reasons += _managed(artifact, execution, place)
    reasons += engine_settings.violations(execution)
    if artifact is not None:
        reasons += engine_settings.draft_violations(artifact.facts, execution.speculative, draft)
        reasons += _adapter(artifact)
        reasons += check(artifact.facts, execution, place)
    return tuple(reasons)


def check(facts: ModelFacts, execution: Execution, place: Device | None) -> tuple[Violation, ...]:
    """Every reason why a model with these facts cannot run so; `place` is None where it is not known."""
    reasons = [*_tensor_parallel(facts, execution), *_pipeline_parallel(facts, execution)]
    if 0 < facts.vocabulary < facts.tokenizer_vocabulary:
        reasons.append(
            Violation(
                "artifact",
                f"has a tokenizer of {facts.tokenizer_vocabulary} tokens and a model of {facts.vocabulary}: they do "
                "not belong together",
            )
        )
    if place is not None and facts.weight_type and not place.runs(facts.weight_type):
        reasons.append(
            Violation("execution.device", f"{place} is not known to have kernels for {facts.weight_type} weights")
        )
    if 0 < facts.context_tokens < execution.context_tokens:
        reasons.append(
            Violation("execution.context_tokens", f"must be at most {facts.context_tokens}, which the model knows")
        )
    return tuple(reasons)


def misfit(adapter: ModelFacts, base: ModelFacts) -> Violation | None:
    """An adapter that says itself that it was made for another kind of model."""
    if not adapter.architecture or not base.architecture or adapter.architecture == base.architecture:
        return None
    return Violation("artifact", f"has an adapter for {adapter.architecture}, and its weights are {base.architecture}")


def replication(facts: ModelFacts, execution: Execution) -> int:
    """How often each KV head is kept; the KV memory of all GPUs then holds so many times fewer tokens."""
    ranks, kv_heads = execution.tensor_parallel or 1, facts.kv_heads
    return ranks // kv_heads if kv_heads and ranks > kv_heads and ranks % kv_heads == 0 else 1


def notes(facts: ModelFacts, execution: Execution) -> tuple[str, ...]:
    """What is no reason against it, and still worth knowing."""
    times = replication(facts, execution)
    if times == 1:
        return ()
    return (
        f"{facts.kv_heads} KV heads on {execution.tensor_parallel} GPUs: each is kept {times} times, so the KV memory "
        f"of all GPUs holds 1/{times} of the tokens that it would hold with {facts.kv_heads} GPUs' share each",
    )


def _tensor_parallel(facts: ModelFacts, execution: Execution) -> list[Violation]:
    ranks = execution.tensor_parallel or 1
    reasons = []
    if facts.heads % ranks:
        reasons.append(f"must divide the {facts.heads} query heads of a layer")
    if facts.kv_heads % ranks and ranks % facts.kv_heads:
        reasons.append(f"must divide the {facts.kv_heads} KV heads of a layer, or be a multiple of them")
    return [Violation("execution.tensor_parallel", reason) for reason in reasons]


def _pipeline_parallel(facts: ModelFacts, execution: Execution) -> list[Violation]:
    if facts.layers % (execution.pipeline_parallel or 1) == 0:
        return []
    return [Violation("execution.pipeline_parallel", f"must divide the {facts.layers} layers")]


def _llamacpp(artifact: Artifact | None, execution: Execution) -> list[Violation]:
    """What this engine cannot do, whatever the model."""
    at = "execution"
    reasons = []
    if execution.device:
        reasons.append(Violation(f"{at}.device", "must be cpu: llama.cpp runs on the CPU here"))
    for field in ("tensor_parallel", "pipeline_parallel"):
        if getattr(execution, field):
            reasons.append(Violation(f"{at}.{field}", "must be 0 or 1: llama.cpp runs in one process here"))
    weights = artifact.file_of(FileKind.WEIGHTS) if artifact else None
    if weights is not None and weights.path.endswith((".safetensors", ".bin")):
        reasons.append(Violation("artifact", f"has its weights in {weights.path}, and llama.cpp loads GGUF files"))
    adapters = [file.path for file in artifact.files if file.kind is FileKind.ADAPTER] if artifact else []
    if len(adapters) > 1 or (adapters and not adapters[0].endswith(".gguf")):
        said = ", ".join(sorted(adapters))
        reasons.append(Violation("artifact", f"has its adapter in {said}, and llama.cpp loads one GGUF file"))
    template = artifact.file_of(FileKind.CHAT_TEMPLATE) if artifact else None
    if template is not None and template.path.endswith(".json"):
        reasons.append(Violation("artifact", f"has its chat template in {template.path}: llama.cpp needs it as Jinja"))
    return reasons


def _managed(artifact: Artifact | None, execution: Execution, place: Device | None) -> list[Violation]:
    """What the GPU engines cannot do, whatever the model: they load a folder as Hugging Face has it."""
    at, engine = "execution", execution.engine
    reasons = []
    if place is not None and place.kind == "cpu" and engine is not Engine.VLLM:
        reasons.append(
            Violation(f"{at}.device", f"must be cuda-sm with a compute capability: {engine.value} needs GPUs")
        )
    if execution.pipeline_parallel > 1:
        reasons.append(Violation(f"{at}.pipeline_parallel", f"must be 0 or 1: {engine.value} is run in one stage here"))
    weights = artifact.file_of(FileKind.WEIGHTS) if artifact else None
    if artifact is None or weights is None:
        return reasons  # refused anyway
    folder = manifest.folder_of(weights.path)
    if not weights.path.endswith((".safetensors", ".bin")):
        reasons.append(
            Violation("artifact", f"has its weights in {weights.path}, and {engine.value} loads safetensors")
        )
    present = {file.path for file in artifact.files}
    for name in ("config.json", "tokenizer.json"):
        if folder + name not in present:
            reasons.append(Violation("artifact", f"has no {name} beside its weights, and {engine.value} needs it"))
    adapters = {manifest.folder_of(file.path) for file in artifact.files if file.kind is FileKind.ADAPTER}
    if len(adapters) > 1 or folder in adapters:
        reasons.append(Violation("artifact", f"must have its adapter in one folder of its own for {engine.value}"))
    return reasons


def _adapter(artifact: Artifact) -> list[Violation]:
    """An adapter beside the base that it was not made for."""
    base, wanted = manifest.base_of(artifact), artifact.facts.base_digest
    if base is None or base.file_of(FileKind.WEIGHTS) is None:
        return []  # without weights it is refused anyway
    if not wanted:
        return [Violation("artifact", "has an adapter and does not say of which base: register it with --base")]
    if base.digest != wanted:
        return [Violation("artifact", f"has an adapter of {wanted[:12]}, and its base is {base.digest[:12]}")]
    return []
