"""Resources and snapshots to and from their protos: what the Registry stores and what readers follow.

Decoding checks: an unknown enum value, a digest that does not match the content, or a name that does not
match the digest raises `BadRecord`, so that nothing half-understood is ever routed on.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.adapters import execution_codec
from headrace.adapters.execution_codec import enum_of, execution_from_proto, execution_to_proto
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import resources_pb2, routing_pb2
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Artifact,
    ArtifactFile,
    Effort,
    FailureDomain,
    FileKind,
    Labels,
    ModelFacts,
    Replica,
    ReplicaState,
    RequestPolicy,
    Revision,
    Sampling,
)
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot

BadRecord = execution_codec.BadRecord

_KINDS: dict[FileKind, Any] = {k: resources_pb2.ArtifactFile.Kind.Value(f"KIND_{k.name}") for k in FileKind}
_STATES: dict[ReplicaState, Any] = {s: resources_pb2.Replica.State.Value(f"STATE_{s.name}") for s in ReplicaState}
EFFORTS: dict[Effort, Any] = {e: inference_pb2.ReasoningEffort.Value(f"REASONING_EFFORT_{e.name}") for e in Effort}

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def artifact_to_proto(artifact: Artifact) -> resources_pb2.Artifact:
    """Encode an artifact."""
    return resources_pb2.Artifact(
        name=artifact.name,
        digest=artifact.digest,
        files=[
            resources_pb2.ArtifactFile(path=f.path, size=f.size, sha256=f.sha256, kind=_KINDS[f.kind])
            for f in artifact.files
        ],
        location=artifact.location,
        create_time=timestamp(artifact.create_time_ms),
        labels=dict(artifact.labels),
        facts=facts_to_proto(artifact.facts),
        signature=artifact.signature,
    )


def artifact_from_proto(message: resources_pb2.Artifact) -> Artifact:
    """Decode an artifact.

    Raises:
        BadRecord: it does not hold together.
    """
    artifact = Artifact(
        files=tuple(ArtifactFile(f.path, f.size, f.sha256, enum_of(_KINDS, f.kind, "kind")) for f in message.files),
        location=message.location,
        create_time_ms=_milliseconds(message.create_time),
        labels=labels_of(message.labels),
        facts=facts_from_proto(message.facts),
        signature=message.signature,
    )
    _check_identity(artifact.name, artifact.digest, message.name, message.digest)
    return artifact


def facts_to_proto(facts: ModelFacts) -> resources_pb2.ModelFacts | None:
    """Encode facts; None where the files say nothing."""
    return None if facts == ModelFacts() else resources_pb2.ModelFacts(**dataclasses.asdict(facts))


def facts_from_proto(message: resources_pb2.ModelFacts) -> ModelFacts:
    """Decode facts; an unset message becomes none."""
    return ModelFacts(**{f.name: getattr(message, f.name) for f in dataclasses.fields(ModelFacts)})


def labels_of(labels: Mapping[str, str]) -> Labels:
    """Decode labels: ordered by key."""
    return tuple(sorted(labels.items()))


def sampling_to_proto(sampling: Sampling) -> inference_pb2.SamplingParameters:
    """Encode sampling parameters; None stays unset."""
    message = inference_pb2.SamplingParameters()
    for field in _SAMPLING_FIELDS:
        value = getattr(sampling, field)
        if value is not None:
            setattr(message, field, value)
    return message


def sampling_from_proto(message: inference_pb2.SamplingParameters) -> Sampling:
    """Decode sampling parameters; unset becomes None."""
    return Sampling(**{f: getattr(message, f) for f in _SAMPLING_FIELDS if message.HasField(f)})


def revision_to_proto(revision: Revision) -> resources_pb2.Revision:
    """Encode a revision; `artifact_digest` travels with the artifact itself."""
    run, policy = revision.execution, revision.policy
    return resources_pb2.Revision(
        name=revision.name,
        digest=revision.digest,
        artifact=revision.artifact,
        execution=execution_to_proto(run),
        policy=resources_pb2.RequestPolicy(
            max_output_tokens=policy.max_output_tokens,
            default_sampling=sampling_to_proto(policy.default_sampling),
            supported_efforts=sorted(EFFORTS[e] for e in policy.supported_efforts),
            default_effort=EFFORTS[policy.default_effort] if policy.default_effort else None,
        ),
        create_time=timestamp(revision.create_time_ms),
        labels=dict(revision.labels),
        runtime=revision.runtime,
        policy_version=revision.policy_version,
    )


def revision_from_proto(
    message: resources_pb2.Revision, *, model: str, artifact_digest: str, check: bool = True
) -> Revision:
    """Decode a revision.

    Args:
        message: the proto.
        model: id of the model it belongs to.
        artifact_digest: full digest of its artifact, "" for the synthetic engine.
        check: whether name and digest must match; False for a revision that is being created.

    Raises:
        BadRecord: it does not hold together.
    """
    run, policy = message.execution, message.policy
    revision = Revision(
        model=model,
        artifact=message.artifact,
        artifact_digest=artifact_digest,
        execution=execution_from_proto(run),
        policy=RequestPolicy(
            max_output_tokens=policy.max_output_tokens,
            default_sampling=sampling_from_proto(policy.default_sampling),
            supported_efforts=frozenset(enum_of(EFFORTS, e, "supported_efforts") for e in policy.supported_efforts),
            default_effort=enum_of(EFFORTS, policy.default_effort, "default_effort") if policy.default_effort else None,
        ),
        create_time_ms=_milliseconds(message.create_time),
        labels=labels_of(message.labels),
        runtime=message.runtime,
        policy_version=message.policy_version,
    )
    if check:
        _check_identity(revision.name, revision.digest, message.name, message.digest)
    return revision


def alias_to_proto(alias: Alias) -> resources_pb2.Alias:
    """Encode an alias."""
    return resources_pb2.Alias(
        name=alias.name,
        targets=[resources_pb2.AliasTarget(revision=t.revision, weight=t.weight) for t in alias.targets],
        etag=alias.etag,
        update_time=timestamp(alias.update_time_ms),
        labels=dict(alias.labels),
        last_good=[resources_pb2.AliasTarget(revision=t.revision, weight=t.weight) for t in alias.last_good],
    )


def alias_from_proto(message: resources_pb2.Alias) -> Alias:
    """Decode an alias."""
    return Alias(
        name=message.name,
        targets=tuple(AliasTarget(t.revision, t.weight) for t in message.targets),
        etag=message.etag,
        update_time_ms=_milliseconds(message.update_time),
        labels=labels_of(message.labels),
        last_good=tuple(AliasTarget(t.revision, t.weight) for t in message.last_good),
    )


def replica_to_proto(replica: Replica) -> resources_pb2.Replica:
    """Encode a replica."""
    domain = replica.failure_domain
    return resources_pb2.Replica(
        name=replica.name,
        revision=replica.revision,
        scheduler=replica.scheduler,
        endpoint=replica.endpoint,
        state=_STATES[replica.state],
        epoch=replica.epoch,
        slots=replica.slots,
        kv_cells=replica.kv_cells,
        failure_domain=resources_pb2.FailureDomain(host=domain.host, rack=domain.rack, zone=domain.zone),
        detail=replica.detail,
        guided_decoding=sorted(replica.guided),
    )


def replica_from_proto(message: resources_pb2.Replica, *, epoch: int | None = None) -> Replica:
    """Decode a replica; `epoch` replaces the one in the record (the store's create revision is the truth).

    Raises:
        BadRecord: its state is unknown.
    """
    domain = message.failure_domain
    return Replica(
        name=message.name,
        revision=sys.intern(message.revision),  # thousands of replicas share these
        scheduler=sys.intern(message.scheduler),
        endpoint=sys.intern(message.endpoint),
        state=enum_of(_STATES, message.state, "state"),
        epoch=message.epoch if epoch is None else epoch,
        slots=message.slots,
        kv_cells=message.kv_cells,
        failure_domain=FailureDomain(domain.host, domain.rack, domain.zone),
        detail=message.detail,
        guided=_shared(tuple(message.guided_decoding)),
    )


@functools.lru_cache(maxsize=256)
def _shared(words: tuple[str, ...]) -> frozenset[str]:
    """The same set for the same words: thousands of replicas have them."""
    return frozenset(words)


def revocation_to_proto(revocation: Revocation) -> resources_pb2.Revocation:
    """Encode a revocation."""
    return resources_pb2.Revocation(
        name=revocation.name,
        reason=revocation.reason,
        end_running=revocation.end_running,
        create_time=timestamp(revocation.create_time_ms),
    )


def revocation_from_proto(message: resources_pb2.Revocation) -> Revocation:
    """Decode a revocation."""
    return Revocation(message.name, message.reason, message.end_running, _milliseconds(message.create_time))


def snapshot_to_proto(snapshot: RoutingSnapshot) -> routing_pb2.RoutingSnapshot:
    """Encode a snapshot whole, for whoever asks for it; the store has shards."""
    return routing_pb2.RoutingSnapshot(
        incarnation=snapshot.incarnation,
        version=snapshot.version,
        digest=snapshot.digest,
        publish_time=timestamp(snapshot.publish_time_ms),
        soft_age=duration(snapshot.soft_age_s),
        hard_age=duration(snapshot.hard_age_s),
        artifacts=map(artifact_to_proto, snapshot.artifacts),
        revisions=map(revision_to_proto, snapshot.revisions),
        aliases=map(alias_to_proto, snapshot.aliases),
        replicas=map(replica_to_proto, sorted(snapshot.replicas, key=lambda r: r.name)),
        revocations=map(revocation_to_proto, snapshot.revocations),
    )


def model_of(revision_name: str) -> str:
    """Model id in a revision's name; "" if it is not one."""
    parts = revision_name.split("/")
    return parts[1] if len(parts) == 4 else ""


def _check_identity(name: str, digest: str, said_name: str, said_digest: str) -> None:
    if (name, digest) != (said_name, said_digest):
        raise BadRecord(f"{said_name or 'a record'} does not match its content, which is {name}")


def timestamp(milliseconds: int) -> Timestamp:
    """Unix time in milliseconds as a Timestamp."""
    stamp = Timestamp()
    stamp.FromMilliseconds(milliseconds)
    return stamp


def _milliseconds(stamp: Timestamp) -> int:
    return stamp.ToMilliseconds()


def duration(seconds: float) -> Duration:
    """Seconds, to the millisecond, as a Duration."""
    message = Duration()
    message.FromMilliseconds(round(seconds * 1000))
    return message
