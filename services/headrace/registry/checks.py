"""What a request to the Registry must hold before anything is stored: all that is wrong is named at once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from headrace.adapters import route_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.compatibility import incompatibilities
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
LABELS_MAX = 64
LABEL_BYTES_MAX = 256
LABELS_BYTES_MAX = 2048
"""Of all labels of a resource, keys and values together."""
REASON_CHARACTERS_MAX = 500
RUNTIME_CHARACTERS_MAX = 200
PREFILL_CHUNK = 128
"""What an unset prefill_chunk means, tokens."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[a-z]([a-z0-9_./-]{0,61}[a-z0-9])?")


class Wrong:
    """Collects violations."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def unless(self, good: bool, field: str, description: str) -> None:
        """Note that a field is wrong, unless it is good."""
        if not good:
            self._found.append(Violation(field, description))

    def done(self) -> None:
        """Refuse the request if anything is wrong.

        Raises:
            InvalidRequest: with all of it.
        """
        if self._found:
            raise InvalidRequest(tuple(self._found))


def checked_artifact(message: resources_pb2.Artifact, now_ms: int) -> Artifact:
    """Make an artifact of a request.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    wrong = Wrong()
    wrong.unless(0 < len(message.files) <= FILES_MAX, "artifact.files", f"must have 1 to {FILES_MAX} files")
    wrong.unless(bool(message.location.strip()), "artifact.location", "must be the directory of the files")
    check_labels(wrong, message.labels, "artifact.labels")
    _check_facts(wrong, message.facts)
    signed = not message.signature or _is_inside(message.signature)
    wrong.unless(signed, "artifact.signature", "must be a path below the location, with '/' between parts")
    paths: set[str] = set()
    for index, file in enumerate(message.files[:FILES_MAX]):
        at = f"artifact.files[{index}]"
        wrong.unless(_is_inside(file.path), f"{at}.path", "must be a path below the location, with '/' between parts")
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
        labels=route_codec.labels_of(message.labels),
        facts=route_codec.facts_from_proto(message.facts),
        signature=message.signature,
    )
    wrong.unless(message.name in ("", artifact.name), "artifact.name", f"must be empty or {artifact.name}")
    wrong.unless(message.digest in ("", artifact.digest), "artifact.digest", f"must be empty or {artifact.digest}")
    wrong.done()
    return artifact


def checked_revision(
    message: resources_pb2.Revision, *, model: str, artifact: Artifact | None, draft: Artifact | None, now_ms: int
) -> Revision:
    """Make a revision of a request; `artifact` and `draft` are what it names, None when it names nothing.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    wrong = Wrong()
    known = message.execution.engine in resources_pb2.Execution.Engine.values() and message.execution.engine != 0
    wrong.unless(known, "revision.execution.engine", "must be a known engine")
    known = message.execution.abort in resources_pb2.Execution.Abort.values()
    wrong.unless(known, "revision.execution.abort", "must be a known one")
    known = message.execution.speculative.method in resources_pb2.Speculative.Method.values()
    wrong.unless(known, "revision.execution.speculative.method", "must be a known one")
    wrong.done()  # nothing else can be judged without
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
    check_labels(wrong, message.labels, "revision.labels")
    _check_execution(wrong, revision.execution)
    _check_policy(wrong, revision.policy, revision.execution)
    word = len(revision.runtime) <= RUNTIME_CHARACTERS_MAX and revision.runtime.isprintable()
    wrong.unless(word, "revision.runtime", f"must be at most {RUNTIME_CHARACTERS_MAX} printable characters")
    for reason in incompatibilities(artifact, revision.execution, draft):
        wrong.unless(False, f"revision.{reason.field}", reason.description)
    if revision.execution.engine is not Engine.SYNTHETIC:
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
    wrong = Wrong()
    wrong.unless(0 < len(message.targets) <= TARGETS_MAX, "alias.targets", f"must have 1 to {TARGETS_MAX} targets")
    check_labels(wrong, message.labels, "alias.labels")
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
    return dataclasses.replace(made, update_time_ms=now_ms, last_good=())


def checked_filter(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that a listing is filtered by.

    Raises:
        InvalidRequest: no resource could have them.
    """
    wrong = Wrong()
    check_labels(wrong, labels, "labels")
    wrong.done()
    return dict(labels)


def checked_revocation(message: resources_pb2.Revocation, now_ms: int) -> resources_pb2.Revocation:
    """Make a revocation of a request. What it names need not exist yet, or any more.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    wrong = Wrong()
    wrong.unless(is_revocable(message.name), "revocation.name", REVOCABLE_RULE)
    short = len(message.reason) <= REASON_CHARACTERS_MAX
    wrong.unless(short, "revocation.reason", f"must have at most {REASON_CHARACTERS_MAX} characters")
    wrong.done()
    made = resources_pb2.Revocation(name=message.name, reason=message.reason, end_running=message.end_running)
    made.create_time.FromMilliseconds(now_ms)
    return made


REVOCABLE_RULE = "must be models/MODEL/revisions/DIGEST12, replicas/ID or tenants/ID/keys/ID"


def is_revocable(name: str) -> bool:
    """Whether this is the name of something that can be revoked."""
    parts = name.split("/")
    if parts[0] == "tenants":
        return len(parts) == 4 and parts[2] == "keys" and names.is_id(parts[1]) and names.is_id(parts[3])
    try:
        if parts[0] == "replicas":
            names.parse(name, "replicas")
        else:
            names.parse_revision(name)
    except InvalidRequest:
        return False
    return True


def _is_inside(path: str) -> bool:
    """Whether this is a path that stays below where it starts."""
    return bool(path) and not any(part in ("", ".", "..") for part in path.split("/")) and "\0" not in path


def check_labels(wrong: Wrong, labels: Mapping[str, str], field: str) -> None:
    """Note what is wrong with labels."""
    wrong.unless(len(labels) <= LABELS_MAX, field, f"must be at most {LABELS_MAX}")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in labels.items())
    wrong.unless(size <= LABELS_BYTES_MAX, field, f"must have at most {LABELS_BYTES_MAX} bytes together")
    for key in sorted(labels)[:LABELS_MAX]:
        rule = (
            "1 to 63 characters of a-z, 0-9, '_', '-', '.' and '/', beginning with a letter, ending in one or a digit"
        )
        wrong.unless(_LABEL.fullmatch(key) is not None, field, f"{key[:63]!r} is no key: {rule}")
        value = labels[key]
        good = len(value.encode()) <= LABEL_BYTES_MAX and value.isprintable()
        wrong.unless(good, f"{field}[{key[:63]}]", f"must be at most {LABEL_BYTES_MAX} bytes of printable text")


def _check_facts(wrong: Wrong, facts: resources_pb2.ModelFacts) -> None:
    for name in ("architecture", "weight_type"):
        text = getattr(facts, name)
        wrong.unless(len(text) <= 63 and text.isprintable(), f"artifact.facts.{name}", "must be a short word")
    good = not facts.base_digest or _SHA256.fullmatch(facts.base_digest) is not None
    wrong.unless(good, "artifact.facts.base_digest", "must be empty or 64 lower-case hex digits")


def _check_execution(wrong: Wrong, run: Execution) -> None:
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


def _check_policy(wrong: Wrong, policy: RequestPolicy, run: Execution) -> None:
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
