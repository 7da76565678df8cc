"""Registering a model: artifact, revision and alias, in three calls to the Registry, and the wait for a worker.

Blocking; `headrace up` calls it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import grpc

from headrace.adapters.route_codec import artifact_to_proto
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.actor import with_actor
from headrace.cli.manifests import Source, hash_files, make
from headrace.cli.problems import EXIT_USAGE, Problem, from_rpc
from headrace.cli.weights import check_digest, check_gguf
from headrace.control import names
from headrace.control.resources import FileKind, Labels
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
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    device: str = ""
    gpus: int = 0
    gpu_memory_fraction: float = 0.0
    dtype: str = ""
    kv_events: bool = False
    eager: bool = False
    abort: str = ""
    """Name of an `Abort`; "": what is held for safe."""
    speculative: str = ""
    """Name of a `DraftMethod`; "": none."""
    draft_tokens: int = 0
    draft_artifact: str = ""
    ngram_max: int = 0

    def to_proto(self, engine: resources_pb2.Execution.Engine) -> resources_pb2.Execution:
        """As the Registry stores it."""
        message = resources_pb2.Execution(
            engine=engine,
            context_tokens=self.context_tokens,
            slots=self.slots,
            kv_cells=self.kv_cells,
            prefill_chunk=self.prefill_chunk,
            threads=self.threads,
            synthetic_prefill_tokens_per_s=self.prefill_tokens_per_s,
            synthetic_decode_tokens_per_s=self.decode_tokens_per_s,
            run_ahead_tokens=self.run_ahead_tokens,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            device=self.device,
            gpus=self.gpus,
            gpu_memory_fraction=self.gpu_memory_fraction,
            dtype=self.dtype,
            kv_events=self.kv_events,
            eager=self.eager,
        )
        if self.abort:
            message.abort = getattr(resources_pb2.Execution, f"ABORT_{self.abort.upper()}")
        if self.speculative or self.draft_tokens or self.draft_artifact or self.ngram_max:
            one = message.speculative
            one.method = getattr(resources_pb2.Speculative, f"METHOD_{(self.speculative or 'unspecified').upper()}")
            one.draft_tokens, one.ngram_max = self.draft_tokens, self.ngram_max
            one.draft_artifact = full_artifact(self.draft_artifact) if self.draft_artifact else ""
        return message


class Admin:
    """A Registry at host:port."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self.stub = pb_grpc.RegistryServiceStub(with_actor(self._channel))

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
        self,
        *,
        name: str,
        engine: resources_pb2.Execution.Engine,
        execution: Execution,
        artifact: str = "",
        labels: Labels = (),
    ) -> str:
        """Create the revision and point the alias `name` at it; returns the revision's name."""
        revision = resources_pb2.Revision(artifact=artifact, execution=execution.to_proto(engine), labels=dict(labels))
        stored = self.create_revision(name, revision)
        self.set_alias(name, stored)
        return stored

    def create_revision(self, model: str, revision: resources_pb2.Revision) -> str:
        """Register a revision of `model` (an id); returns its name."""
        request = pb.CreateRevisionRequest(model=f"models/{model}", revision=revision)
        with self.errors():
            return self.stub.CreateRevision(request, timeout=CALL_S).revision.name

    def set_alias(self, name: str, revision: str) -> None:
        """Point the alias `name` (an id) at one revision; its labels stay."""
        target = resources_pb2.AliasTarget(revision=revision, weight=1)
        alias = resources_pb2.Alias(name=f"aliases/{name}", targets=[target])
        self.keep_labels(alias)
        with self.errors():
            self.stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=CALL_S)

    def keep_labels(self, alias: resources_pb2.Alias) -> None:
        """Give an alias that is to be written the labels that it has, and write it over that state only."""
        read = next((found for found in self.aliases({}) if found.name == alias.name), None)
        if read is not None:
            alias.labels.update(read.labels)
            alias.etag = alias.etag or read.etag

    def aliases(self, labels: Mapping[str, str]) -> list[resources_pb2.Alias]:
        """All aliases with these labels, page by page."""
        found: list[resources_pb2.Alias] = []
        token = ""
        while True:
            request = pb.ListAliasesRequest(page_token=token, labels=labels, page_size=1000)
            with self.errors():
                page = self.stub.ListAliases(request, timeout=CALL_S)
            found += page.aliases
            token = page.next_page_token
            if not token:
                return found

    def artifact(self, name: str) -> resources_pb2.Artifact:
        """The artifact of that name, or of its digest's first 12 digits."""
        with self.errors():
            return self.stub.GetArtifact(pb.GetArtifactRequest(name=full_artifact(name)), timeout=CALL_S).artifact

    def artifacts(self, labels: Mapping[str, str]) -> list[resources_pb2.Artifact]:
        """All artifacts with these labels, page by page."""
        found: list[resources_pb2.Artifact] = []
        token = ""
        while True:
            request = pb.ListArtifactsRequest(page_token=token, labels=labels)
            with self.errors():
                page = self.stub.ListArtifacts(request, timeout=CALL_S)
            found += page.artifacts
            token = page.next_page_token
            if not token:
                return found

    def revision(self, name: str) -> resources_pb2.Revision:
        """The revision of that name."""
        with self.errors():
            return self.stub.GetRevision(pb.GetRevisionRequest(name=name), timeout=CALL_S).revision

    def revisions(self, model: str, labels: Mapping[str, str]) -> list[resources_pb2.Revision]:
        """All revisions with these labels, of one model (an id) or all, page by page."""
        found: list[resources_pb2.Revision] = []
        token = ""
        while True:
            request = pb.ListRevisionsRequest(page_token=token, labels=labels, model=f"models/{model}" if model else "")
            with self.errors():
                page = self.stub.ListRevisions(request, timeout=CALL_S)
            found += page.revisions
            token = page.next_page_token
            if not token:
                return found

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
    weights: Path,
    *,
    chat_template: Path | None,
    expected: str,
    labels: Labels = (),
    progress: Callable[[int, int], None] | None = None,
) -> resources_pb2.Artifact:
    """Check, hash and read a model's files.

    Raises:
        Problem: a file is missing, damaged, not a GGUF, or not the one with the expected SHA-256.
    """
    weights = weights.expanduser().resolve()
    check_gguf(weights)
    kinds = {weights: FileKind.WEIGHTS}
    if chat_template is not None:
        kinds[chat_template.expanduser().resolve()] = FileKind.CHAT_TEMPLATE
    location = Path(os.path.commonpath([path.parent for path in kinds]))
    below = {path: path.relative_to(location).as_posix() for path in kinds}
    states = hash_files({below[path]: path for path in kinds}, progress)
    if expected:
        check_digest(weights, states[below[weights]].sha256, expected)
    found = Source(location, {below[path]: path for path in kinds}, whole=False)
    made = make(found, states=states, kinds={below[path]: kind for path, kind in kinds.items()}, labels=labels)
    return artifact_to_proto(made)


def parse_labels(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Labels:
    """Callback of --label: "key=value", each key once."""
    found: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key or key in found:
            raise click.BadParameter(f"{text!r} must be KEY=VALUE, each key once", context, parameter)
        found[key] = value
    return tuple(sorted(found.items()))


def full_artifact(name: str) -> str:
    """Make "artifacts/0123456789ab" of that, of "0123456789ab", or of a whole digest."""
    return names.artifact(name.removeprefix("artifacts/"))


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
