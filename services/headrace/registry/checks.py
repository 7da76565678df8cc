"""What a request to the Registry must hold before anything is stored: all that is wrong is named at once."""

from __future__ import annotations

import dataclasses
import math
import re

from headrace.adapters import route_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import InvalidRequest, Violation
from headrace.control.resources import (
    Alias,
    Artifact,
    ArtifactFile,
    Engine,
    Execution,
    FileKind,
    RequestPolicy,
    Revision,
)
from headrace.control.validation import sampling_violation

FILES_MAX = 1000
TARGETS_MAX = 32
WEIGHT_MAX = 1_000_000
SLOTS_MAX = 1024
TOKENS_MAX = 10_000_000
PREFILL_CHUNK = 128
"""What an unset prefill_chunk means, tokens."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Wrong:
    """Collects violations."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def unless(self, good: bool, field: str, description: str) -> None:
        if not good:
            self._found.append(Violation(field, description))

    def done(self) -> None:
        if self._found:
            raise InvalidRequest(tuple(self._found))


def checked_artifact(message: resources_pb2.Artifact, now_ms: int) -> Artifact:
    """Make an artifact of a request.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    wrong = _Wrong()
    wrong.unless(0 < len(message.files) <= FILES_MAX, "artifact.files", f"must have 1 to {FILES_MAX} files")
    wrong.unless(bool(message.location.strip()), "artifact.location", "must be the directory of the files")
    paths: set[str] = set()
    for index, file in enumerate(message.files[:FILES_MAX]):
        at = f"artifact.files[{index}]"
        parts = file.path.split("/")
        inside = bool(file.path) and not any(part in ("", ".", "..") for part in parts) and "\0" not in file.path
        wrong.unless(inside, f"{at}.path", "must be a path below the location, with '/' between parts")
        wrong.unless(file.path not in paths, f"{at}.path", "occurs twice")
        paths.add(file.path)
        wrong.unless(_SHA256.fullmatch(file.sha256) is not None, f"{at}.sha256", "must be 64 lower-case hex digits")
        known = file.kind in resources_pb2.ArtifactFile.Kind.values() and file.kind != 0
        wrong.unless(known, f"{at}.kind", "must be a known kind")
    wrong.done()
    files = sorted(message.files, key=lambda file: file.path)
    artifact = Artifact(
        files=tuple(ArtifactFile(f.path, f.size, f.sha256, _kind(f.kind)) for f in files),
        location=message.location,
        create_time_ms=now_ms,
    )
    wrong.unless(message.name in ("", artifact.name), "artifact.name", f"must be empty or {artifact.name}")
    wrong.unless(message.digest in ("", artifact.digest), "artifact.digest", f"must be empty or {artifact.digest}")
    wrong.done()
    return artifact


def checked_revision(
    message: resources_pb2.Revision, *, model: str, artifact: Artifact | None, now_ms: int
) -> Revision:
    """Make a revision of a request; `artifact` is what `message.artifact` names, None when it names nothing.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    wrong = _Wrong()
    known = message.execution.engine in resources_pb2.Execution.Engine.values() and message.execution.engine != 0
    wrong.unless(known, "revision.execution.engine", "must be a known engine")
    wrong.done()
    filled = resources_pb2.Revision()
    filled.CopyFrom(message)
    filled.execution.prefill_chunk = message.execution.prefill_chunk or PREFILL_CHUNK
    filled.create_time.FromMilliseconds(now_ms)
    try:
        revision = route_codec.revision_from_proto(
            filled, model=model, artifact_digest=artifact.digest if artifact else "", check=False
        )
    except BadRecord as error:
        raise InvalidRequest((Violation("revision.policy", str(error)),)) from None
    _check_execution(wrong, revision.execution)
    _check_policy(wrong, revision.policy, revision.execution)
    if revision.execution.engine is Engine.LLAMACPP:
        has_weights = artifact is not None and artifact.file_of(FileKind.WEIGHTS) is not None
        wrong.unless(has_weights, "revision.artifact", "must name an artifact with weights")
    wrong.unless(message.name in ("", revision.name), "revision.name", f"must be empty or {revision.name}")
    wrong.unless(message.digest in ("", revision.digest), "revision.digest", f"must be empty or {revision.digest}")
    wrong.done()
    return revision


def checked_alias(message: resources_pb2.Alias, now_ms: int) -> Alias:
    """Make an alias of a request; whether its targets exist is the store's to say.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    names.parse(message.name, "aliases", field="alias.name")
    wrong = _Wrong()
    wrong.unless(0 < len(message.targets) <= TARGETS_MAX, "alias.targets", f"must have 1 to {TARGETS_MAX} targets")
    seen: set[str] = set()
    for index, target in enumerate(message.targets[:TARGETS_MAX]):
        at = f"alias.targets[{index}]"
        try:
            names.parse_revision(target.revision, field=f"{at}.revision")
        except InvalidRequest as error:
            wrong.unless(False, f"{at}.revision", error.violations[0].description)
        wrong.unless(target.revision not in seen, f"{at}.revision", "occurs twice")
        seen.add(target.revision)
        wrong.unless(1 <= target.weight <= WEIGHT_MAX, f"{at}.weight", f"must be 1 to {WEIGHT_MAX}")
    wrong.done()
    made = route_codec.alias_from_proto(message)
    return Alias(name=made.name, targets=made.targets, etag=made.etag, update_time_ms=now_ms)


def _check_execution(wrong: _Wrong, run: Execution) -> None:
    at = "revision.execution"
    wrong.unless(1 <= run.context_tokens <= TOKENS_MAX, f"{at}.context_tokens", f"must be 1 to {TOKENS_MAX}")
    wrong.unless(1 <= run.slots <= SLOTS_MAX, f"{at}.slots", f"must be 1 to {SLOTS_MAX}")
    wrong.unless(1 <= run.kv_cells <= TOKENS_MAX, f"{at}.kv_cells", f"must be 1 to {TOKENS_MAX}")
    fits = run.context_tokens <= run.kv_cells
    wrong.unless(fits, f"{at}.kv_cells", "must hold at least one sequence of context_tokens")
    wrong.unless(run.prefill_chunk <= TOKENS_MAX, f"{at}.prefill_chunk", f"must be at most {TOKENS_MAX}")
    wrong.unless(run.threads <= 1024, f"{at}.threads", "must be at most 1024")
    wrong.unless(run.run_ahead_tokens <= TOKENS_MAX, f"{at}.run_ahead_tokens", f"must be at most {TOKENS_MAX}")
    pauses = run.engine is Engine.LLAMACPP and run.run_ahead_tokens > 0
    wrong.unless(not pauses, f"{at}.run_ahead_tokens", "must be 0: llama.cpp pauses a sequence by itself")
    for field in ("synthetic_prefill_tokens_per_s", "synthetic_decode_tokens_per_s"):
        value = getattr(run, field)
        wrong.unless(math.isfinite(value) and value >= 0, f"{at}.{field}", "must be 0 or more")


def _check_policy(wrong: _Wrong, policy: RequestPolicy, run: Execution) -> None:
    at = "revision.policy"
    fits = policy.max_output_tokens <= run.context_tokens
    wrong.unless(fits, f"{at}.max_output_tokens", "must not be above context_tokens")
    for field in dataclasses.fields(policy.default_sampling):
        value = getattr(policy.default_sampling, field.name)
        violation = None if value is None else sampling_violation(field.name, value)
        if violation is not None:
            wrong.unless(False, f"{at}.default_sampling.{field.name}", violation.description)


def _kind(kind: resources_pb2.ArtifactFile.Kind) -> FileKind:
    return FileKind[resources_pb2.ArtifactFile.Kind.Name(kind).removeprefix("KIND_")]
