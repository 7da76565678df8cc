"""What a revision may set of the engines that schedule by themselves, and which GPUs such a worker gets.

    execution (+ the artifact that drafts) -> reasons why not, each with the field at fault

Sans-io.
"""

from __future__ import annotations

from headrace.control import names
from headrace.control.errors import InvalidRequest, Violation
from headrace.control.resources import Artifact, DraftMethod, Engine, Execution, FileKind, ModelFacts, Speculative

DTYPES = ("bfloat16", "float16", "float32")
GPUS_MAX = 1024
DRAFT_TOKENS_MAX = 64
NGRAM_MAX_MAX = 32
_ONLY_GPU = ("gpus", "gpu_memory_fraction", "dtype", "kv_events", "abort", "speculative", "eager")


def violations(run: Execution) -> list[Violation]:
    """Every reason why these settings cannot be, whatever the model; fields are paths in a Revision."""
    if not run.engine.schedules_itself:
        return [Violation(f"execution.{name}", _why_not(run.engine, name)) for name in _ONLY_GPU if getattr(run, name)]
    reasons = []
    if run.gpus:
        reasons += _gpus(run)
    if not 0 <= run.gpu_memory_fraction <= 1:  # false for NaN, too
        reasons.append(Violation("execution.gpu_memory_fraction", "must be above 0 and at most 1, or 0 for 0.9"))
    if run.dtype and run.dtype not in DTYPES:
        reasons.append(Violation("execution.dtype", f"must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"))
    if run.speculative is not None:
        reasons += _speculative(run.speculative)
        if run.engine is Engine.SGLANG and run.speculative.method is DraftMethod.NGRAM:
            reasons.append(
                Violation("execution.speculative.method", "must not be ngram: sglang looks up in what all tenants said")
            )
    return reasons


def draft_violations(facts: ModelFacts, speculative: Speculative | None, draft: Artifact | None) -> list[Violation]:
    """Every reason why that artifact cannot draft for a model with these facts.

    Args:
        facts: of the model.
        speculative: as asked for.
        draft: what `speculative.draft_artifact` names; None where that is not known here.
    """
    if speculative is None or draft is None:
        return []
    at = "execution.speculative.draft_artifact"
    reasons = []
    weights = draft.file_of(FileKind.WEIGHTS)
    if weights is None:
        return [Violation(at, "must name an artifact with weights")]
    present = {file.path for file in draft.files}
    if "".join(weights.path.rpartition("/")[:2]) + "config.json" not in present:
        reasons.append(Violation(at, "has no config.json beside its weights"))
    own, theirs = draft.facts.vocabulary, facts.vocabulary
    if speculative.method is DraftMethod.DRAFT_MODEL and own and theirs and own != theirs:
        reasons.append(
            Violation(at, f"has a vocabulary of {own} tokens and the model one of {theirs}: they must agree")
        )
    return reasons


def _why_not(engine: Engine, name: str) -> str:
    if name == "kv_events":
        return f"must be unset: {engine.value} always counts what its prefix cache stores and removes"
    return f"must be unset: {engine.value} has no such setting"


def _gpus(run: Execution) -> list[Violation]:
    at, ranks = "execution.gpus", run.tensor_parallel or 1
    if not run.device:
        return [Violation(at, "must be 0: the device is the CPU")]
    if run.gpus < ranks:
        return [Violation(at, f"must be at least the {ranks} that share a layer (tensor_parallel)")]
    return [] if run.gpus <= GPUS_MAX else [Violation(at, f"must be at most {GPUS_MAX}")]


def _speculative(one: Speculative) -> list[Violation]:
    at = "execution.speculative"
    reasons = []
    if one.method is None:
        reasons.append(Violation(f"{at}.method", "is required: ngram, draft_model or eagle3"))
    if not 1 <= one.draft_tokens <= DRAFT_TOKENS_MAX:
        reasons.append(Violation(f"{at}.draft_tokens", f"must be 1 to {DRAFT_TOKENS_MAX}"))
    if one.method is not None:
        reasons += _draft_source(one, one.method)
    return reasons


def _draft_source(one: Speculative, method: DraftMethod) -> list[Violation]:
    at = "execution.speculative"
    reasons = []
    if not method.has_files and one.draft_artifact:
        reasons.append(Violation(f"{at}.draft_artifact", f"must be empty: {method.value} drafts without files"))
    if method.has_files and not one.draft_artifact:
        reasons.append(Violation(f"{at}.draft_artifact", f"is required: the artifact of the {method.value}"))
    if one.draft_artifact and not _is_artifact(one.draft_artifact):
        reasons.append(Violation(f"{at}.draft_artifact", "must be artifacts/ and 12 hex digits"))
    if method is not DraftMethod.NGRAM and one.ngram_max:
        reasons.append(Violation(f"{at}.ngram_max", "must be 0: only ngram looks anything up"))
    elif one.ngram_max > NGRAM_MAX_MAX:
        reasons.append(Violation(f"{at}.ngram_max", f"must be at most {NGRAM_MAX_MAX}"))
    return reasons


def _is_artifact(name: str) -> bool:
    try:
        names.parse(name, "artifacts")
    except InvalidRequest:
        return False
    return True
