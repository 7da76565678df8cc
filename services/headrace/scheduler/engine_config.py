"""What an engine is told at its start: its configuration document, out of a revision and its artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.control.attempt_book import waiting_max
from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, Revision
from headrace.scheduler.artifacts import ArtifactFault, file_path

_ENGINE_WAITING_SLACK = 16
"""The Scheduler refuses first, so that one place bounds the queue."""


def engine_config(
    revision: Revision,
    artifact: Artifact | None,
    *,
    threads: int,
    incarnation: str,
    kv_over_commit: float = 1.0,
    draft: Artifact | None = None,
    gpus: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the engine's configuration document for a revision.

    Args:
        revision: what it serves.
        artifact: its own; None for the synthetic engine.
        threads: compute threads.
        incarnation: differs for each start.
        kv_over_commit: KV cells that attempts may be promised, in multiples of what there are.
        draft: the artifact that drafts, where one does.
        gpus: what the engine may see, as CUDA_VISIBLE_DEVICES names them; none: all.

    Raises:
        ArtifactFault: an artifact has no weights, or its chat template cannot be read.
    """
    run = revision.execution
    config: dict[str, Any] = {
        "engine": run.engine.value,
        "revision": revision.name,
        "incarnation": incarnation,
        "context_tokens": run.context_tokens,
        "slots": run.slots,
        "kv_cells": run.kv_cells,
        # It counts all without a slot: as many may wait for their first and as many for another one, and the Scheduler
        # may not have heard yet of preemptions, of every slot at most.
        "max_waiting": 2 * waiting_max(run.slots) + run.slots + _ENGINE_WAITING_SLACK,
        "threads": threads,
        "prefill_chunk": run.prefill_chunk,
        "run_ahead_tokens": run.run_ahead_tokens,
    }
    if kv_over_commit > 1:
        config["kv_over_commit"] = kv_over_commit
    if run.engine is Engine.SYNTHETIC:
        config["prefill_tokens_per_s"] = run.synthetic_prefill_tokens_per_s
        config["decode_tokens_per_s"] = run.synthetic_decode_tokens_per_s
    if run.engine.schedules_itself:
        config |= _managed(run, draft, gpus)
    if artifact is not None:
        weights = _weights(artifact)
        own = file_path(artifact, weights)
        config["model_path"] = str(own.parent if run.engine.schedules_itself else own)
        config["model_digest"] = weights.sha256
        adapter = artifact.file_of(FileKind.ADAPTER)
        if adapter is not None:
            own = file_path(artifact, adapter)
            config["adapter_path"] = str(own.parent if run.engine.schedules_itself else own)
        template = artifact.file_of(FileKind.CHAT_TEMPLATE)
        if template is not None:
            try:
                config["chat_template"] = file_path(artifact, template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                raise ArtifactFault(f"the chat template {template.path} of {artifact.name} cannot be read") from None
    return config


def _managed(run: Execution, draft: Artifact | None, gpus: Sequence[str]) -> dict[str, Any]:
    """What only the engines that schedule by themselves are told; what is unset is left to their defaults here."""
    config: dict[str, Any] = {"tensor_parallel": max(1, run.tensor_parallel), "gpus": ",".join(gpus)}
    for name in ("gpu_memory_fraction", "dtype", "kv_events", "eager"):
        if getattr(run, name):
            config[name] = getattr(run, name)
    if run.abort is not None:
        config["abort"] = run.abort.value
    one = run.speculative
    if one is not None and one.method is not None:
        config["speculative"] = {"method": one.method.value, "draft_tokens": one.draft_tokens}
        if one.ngram_max:
            config["speculative"]["ngram_max"] = one.ngram_max
        if one.draft_artifact:
            if draft is None:
                raise ArtifactFault(f"{one.draft_artifact}, which drafts, is not in the snapshot")
            config["speculative"]["draft_path"] = str(file_path(draft, _weights(draft)).parent)
    return config


def _weights(artifact: Artifact) -> ArtifactFile:
    weights = artifact.file_of(FileKind.WEIGHTS)
    if weights is None:
        raise ArtifactFault(f"{artifact.name} has no weights")
    return weights
