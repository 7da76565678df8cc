"""Registering a model: artifact, revision and alias, in three calls to the Registry, and the wait for a worker.

Blocking; `headrace up` calls it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.problems import EXIT_USAGE, Problem, from_rpc
from headrace.cli.weights import check_digest, check_gguf, sha256
from headrace.control import names
from headrace.rpc.channels import CLIENT_OPTIONS

CALL_S = 15.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Execution:
    """How a revision runs; the defaults suit a small model on a small machine."""

    context_tokens: int = 4096
    slots: int = 16
    kv_cells: int = 16384
    prefill_chunk: int = 256
    threads: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    run_ahead_tokens: int = 0

    def to_proto(self, engine: resources_pb2.Execution.Engine) -> resources_pb2.Execution:
        """As the Registry stores it."""
        return resources_pb2.Execution(
            engine=engine,
            context_tokens=self.context_tokens,
            slots=self.slots,
            kv_cells=self.kv_cells,
            prefill_chunk=self.prefill_chunk,
            threads=self.threads,
            synthetic_prefill_tokens_per_s=self.prefill_tokens_per_s,
            synthetic_decode_tokens_per_s=self.decode_tokens_per_s,
            run_ahead_tokens=self.run_ahead_tokens,
        )


class Admin:
    """A Registry at host:port."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self.stub = pb_grpc.RegistryServiceStub(self._channel)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn failed calls into Problems."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc(error, service="registry", address=self.address) from None

    def snapshot(self) -> pb.GetSnapshotResponse:
        """The published routing snapshot."""
        with self.errors():
            return self.stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=CALL_S)

    def add(
        self, *, name: str, engine: resources_pb2.Execution.Engine, execution: Execution, artifact: str = ""
    ) -> str:
        """Create the revision and point the alias `name` at it; returns the revision's name."""
        revision = resources_pb2.Revision(artifact=artifact, execution=execution.to_proto(engine))
        with self.errors():
            stored = self.stub.CreateRevision(
                pb.CreateRevisionRequest(model=f"models/{name}", revision=revision), timeout=CALL_S
            ).revision.name
            alias = resources_pb2.Alias(
                name=f"aliases/{name}", targets=[resources_pb2.AliasTarget(revision=stored, weight=1)]
            )
            self.stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=CALL_S)
        return stored

    def create_artifact(self, manifest: resources_pb2.Artifact) -> str:
        """Register a manifest; returns the artifact's name."""
        with self.errors():
            return self.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=manifest), timeout=CALL_S).artifact.name

    def wait_ready(self, revision: str, timeout_s: float, note: Callable[[str], None]) -> str:
        """Wait until a replica serves `revision`; returns its name.

        Raises:
            Problem: it failed, or `timeout_s` seconds have passed.
        """
        deadline = time.monotonic() + timeout_s
        last = "no Scheduler has taken it yet"
        while time.monotonic() < deadline:
            for replica in self.snapshot().snapshot.replicas:
                if replica.revision != revision:
                    continue
                state = resources_pb2.Replica.State.Name(replica.state).removeprefix("STATE_")
                last = f"{state.lower()}{f': {replica.detail}' if replica.detail else ''}"
                if replica.state == resources_pb2.Replica.STATE_READY:
                    return replica.name
                if replica.state == resources_pb2.Replica.STATE_FAILED:
                    raise Problem(f"the worker of {revision} failed: {replica.detail}")
            note(last)
            time.sleep(_POLL_S)
        raise Problem(f"no worker serves {revision} after {timeout_s:g} s ({last})", hint="headrace status")


def manifest(
    weights: Path, *, chat_template: Path | None, expected: str, progress: Callable[[int, int], None] | None = None
) -> resources_pb2.Artifact:
    """Check and hash a model's files.

    Raises:
        Problem: a file is missing, not a GGUF, or not the one with the expected SHA-256.
    """
    weights = weights.expanduser().resolve()
    check_gguf(weights)
    digest = sha256(weights, progress)
    if expected:
        check_digest(weights, digest, expected)
    found = [(weights, digest, resources_pb2.ArtifactFile.KIND_WEIGHTS)]
    if chat_template is not None:
        chat_template = chat_template.expanduser().resolve()
        found.append((chat_template, sha256(chat_template), resources_pb2.ArtifactFile.KIND_CHAT_TEMPLATE))
    location = Path(os.path.commonpath([path.parent for path, _, _ in found]))
    files = [
        resources_pb2.ArtifactFile(
            path=path.relative_to(location).as_posix(), size=path.stat().st_size, sha256=text, kind=kind
        )
        for path, text, kind in sorted(found)
    ]
    return resources_pb2.Artifact(files=files, location=str(location))


def model_id(name: str | None, path: Path) -> str:
    """The given name, checked, or one made from the file's.

    Raises:
        Problem: the name cannot be used.
    """
    if name is None:
        return names.id_from_text(path.stem)
    if not names.is_id(name):
        raise Problem(f"--name {name!r} cannot be a model's name: it takes {names.ID_RULE}", code=EXIT_USAGE)
    return name
