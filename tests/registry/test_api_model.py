"""The API against a simple model: any sequence of calls has the outcomes and leaves the state that the model says."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.control.errors import Reason
from headrace.rpc import status
from support.etcd import Etcd, etcd_process, make_store
from support.registry_api import Api, artifact, names, revision, serving, set_alias

T = TypeVar("T")
SIZES = st.integers(1, 3)
"""Tell three artifacts apart."""
SLOTS = st.integers(1, 3)
"""Tell three revisions apart; revision i may be of artifact i."""
ALIASES = st.sampled_from(["a", "b", "c"])
LABELS = st.sampled_from([{}, {"env": "prod"}, {"env": "test"}])
STUBS = st.integers(0, 1)


class Loop:
    """One event loop with an etcd, for a test that is not a coroutine."""

    def __init__(self, path: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.etcd: Etcd = self.run(self._stack.enter_async_context(etcd_process(path)))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "etcd")
    yield made
    made.close()


class ApiModel(RuleBasedStateMachine):
    loop: Loop

    def __init__(self) -> None:
        super().__init__()
        self.artifacts: dict[int, str] = {}
        self.revisions: dict[int, str] = {}
        self.made_of: dict[int, int] = {}
        self.aliases: dict[str, tuple[str, dict[str, str], str]] = {}
        """By name: target, labels, etag."""
        self.old_etags: list[str] = ["1"]
        self.known: dict[tuple[str, int], str] = {}
        """Names never change: what an artifact or revision was called, it is always called."""
        self.changes = 0

    @initialize()
    def open(self) -> None:
        self.stack = contextlib.AsyncExitStack()

        async def start() -> Api:
            store = await self.stack.enter_async_context(make_store(self.loop.etcd.endpoint, prefix=f"/{uuid.uuid4()}"))
            return await self.stack.enter_async_context(serving(store))

        self.api = self.loop.run(start())
        self.stubs = [self.api.stub, self.api.other]

    def teardown(self) -> None:
        self.loop.run(self.stack.aclose())

    def call(self, stub: int, method: str, request: Any) -> Any:
        """The answer, or the reason of the refusal."""

        async def made() -> Any:
            call: Callable[[Any], Awaitable[Any]] = getattr(self.stubs[stub], method)
            try:
                return await call(request)
            except grpc.aio.AioRpcError as error:
                failure = status.from_rpc_error(error)
                assert failure is not None
                return failure.reason

        return self.loop.run(made())

    @rule(size=SIZES, stub=STUBS, labels=LABELS)
    def create_artifact(self, size: int, stub: int, labels: dict[str, str]) -> None:
        request = pb.CreateArtifactRequest(artifact=artifact(size, labels=labels))
        name = self.call(stub, "CreateArtifact", request).artifact.name
        assert self.known.setdefault(("artifact", size), name) == name
        self.changes += size not in self.artifacts
        self.artifacts[size] = name

    @rule(size=SIZES, stub=STUBS)
    def move_artifact(self, size: int, stub: int) -> None:
        if size in self.artifacts:
            request = pb.CreateArtifactRequest(artifact=artifact(size, location="/elsewhere"))
            assert self.call(stub, "CreateArtifact", request) is Reason.ALREADY_EXISTS

    @rule(size=SIZES, stub=STUBS)
    def delete_artifact(self, size: int, stub: int) -> None:
        name = self.known.get(("artifact", size), "artifacts/0123456789ab")
        ended = self.call(stub, "DeleteArtifact", pb.DeleteArtifactRequest(name=name))
        if size not in self.artifacts:
            assert ended is Reason.NOT_FOUND
        elif size in self.made_of.values():
            assert ended is Reason.RESOURCE_IN_USE
        else:
            assert not isinstance(ended, Reason)
            del self.artifacts[size]
            self.changes += 1

    @rule(slots=SLOTS, size=st.one_of(st.just(0), SIZES), stub=STUBS)
    def create_revision(self, slots: int, size: int, stub: int) -> None:
        """Revision (slots, size), size 0 for the synthetic engine."""
        of = self.known.get(("artifact", size), "artifacts/0123456789ab") if size else ""
        request = pb.CreateRevisionRequest(model="models/m", revision=revision(slots, artifact=of))
        ended = self.call(stub, "CreateRevision", request)
        if size and size not in self.artifacts:
            assert ended is Reason.NOT_FOUND
            return
        key = 10 * size + slots
        assert self.known.setdefault(("revision", key), ended.revision.name) == ended.revision.name
        self.changes += key not in self.revisions
        self.revisions[key] = ended.revision.name
        if size:
            self.made_of[key] = size

    @rule(slots=SLOTS, size=st.integers(0, 3), stub=STUBS)
    def delete_revision(self, slots: int, size: int, stub: int) -> None:
        key = 10 * size + slots
        name = self.known.get(("revision", key), "models/m/revisions/0123456789ab")
        ended = self.call(stub, "DeleteRevision", pb.DeleteRevisionRequest(name=name))
        if key not in self.revisions:
            assert ended is Reason.NOT_FOUND
        elif name in [target for target, _, _ in self.aliases.values()]:
            assert ended is Reason.RESOURCE_IN_USE
        else:
            assert not isinstance(ended, Reason)
            del self.revisions[key]
            self.made_of.pop(key, None)
            self.changes += 1

    @rule(alias=ALIASES, slots=SLOTS, size=st.integers(0, 3), labels=LABELS, data=st.data(), stub=STUBS)
    def set_alias(self, alias: str, slots: int, size: int, labels: dict[str, str], data: Any, stub: int) -> None:
        key = 10 * size + slots
        target = self.known.get(("revision", key), "models/m/revisions/0123456789ab")
        etag = self.drawn_etag(alias, data)
        ended = self.call(stub, "SetAlias", set_alias(alias, target, labels=labels, etag=etag))
        stored = self.aliases.get(alias)
        if etag and (stored is None or stored[2] != etag):
            assert ended is Reason.ETAG_MISMATCH
        elif key not in self.revisions:
            assert ended is Reason.NOT_FOUND
        elif stored is not None and stored[:2] == (target, labels):
            assert ended.alias.etag == stored[2]
        else:
            new = ended.alias.etag
            assert new not in self.old_etags
            self.old_etags.append(new)
            self.aliases[alias] = (target, labels, new)
            self.changes += 1

    @rule(alias=ALIASES, data=st.data(), stub=STUBS)
    def delete_alias(self, alias: str, data: Any, stub: int) -> None:
        etag = self.drawn_etag(alias, data)
        ended = self.call(stub, "DeleteAlias", pb.DeleteAliasRequest(name=f"aliases/{alias}", etag=etag))
        if alias not in self.aliases:
            assert ended is Reason.NOT_FOUND
        elif etag not in ("", self.aliases[alias][2]):
            assert ended is Reason.ETAG_MISMATCH
        else:
            assert not isinstance(ended, Reason)
            del self.aliases[alias]
            self.changes += 1

    def drawn_etag(self, alias: str, data: Any) -> str:
        """None, the right one, or one of another state."""
        right = self.aliases[alias][2] if alias in self.aliases else "1"
        return str(data.draw(st.one_of(st.just(""), st.just(right), st.sampled_from(self.old_etags))))

    @rule(labels=LABELS, size=st.integers(1, 3), stub=STUBS)
    def list_aliases(self, labels: dict[str, str], size: int, stub: int) -> None:
        request, found = pb.ListAliasesRequest(labels=labels, page_size=size), []
        while True:
            page = self.call(stub, "ListAliases", request)
            found += [(a.name.removeprefix("aliases/"), a.targets[0].revision, a.etag) for a in page.aliases]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        wanted = {name: held for name, held in self.aliases.items() if labels.items() <= held[1].items()}
        assert found == [(name, target, etag) for name, (target, _, etag) in sorted(wanted.items())]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        listed = self.call(0, "ListArtifacts", pb.ListArtifactsRequest()).artifacts
        assert names(listed) == sorted(self.artifacts.values())
        revisions = self.call(1, "ListRevisions", pb.ListRevisionsRequest()).revisions
        assert names(revisions) == sorted(self.revisions.values())
        records = self.call(0, "ListAuditRecords", pb.ListAuditRecordsRequest(page_size=1000)).records
        assert len(records) == self.changes, "a record for each change, and for nothing else"


def test_any_sequence_of_calls_does_what_the_model_says(loop: Loop) -> None:
    machine = type("Machine", (ApiModel,), {"loop": loop})
    limits = settings(
        max_examples=25, stateful_step_count=30, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=limits)  # type: ignore[no-untyped-call]
