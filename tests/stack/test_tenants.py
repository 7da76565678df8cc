"""Keys on the real stack: a Router of the test's own that wants them, beside the stack's that does not."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from support.etcd import free_port
from support.stack import COMMAND, SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

HONOURED_S = 1.0
"""A revoked key is refused within this."""


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def router(stack: RunningStack, tmp_path: Path) -> Iterator[str]:
    """host:port of a Router with `authentication` "required" and health closed."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "router.log"
    command = [*COMMAND, "router", "--name", "closed", "--listen", address, "--etcd", stack.etcd]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--authentication", "required", "--public-health", "false"], stdout=output, stderr=output
        )
    try:
        until(lambda: b"scheduler_link_up" in log.read_bytes() or process.poll() is not None)
        yield address
        assert process.poll() is None, log.read_text()
        assert b"hr_" not in log.read_bytes(), "no key is logged"
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def tenant(stack: RunningStack) -> Iterator[str]:
    """A tenant of the test's own."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    made = stack.run("tenant", "set", name, "--concurrency", "4", "--priority-ceiling", "batch")
    assert made.returncode == 0, made.stderr
    yield name
    stack.run("tenant", "delete", name)


def make_key(stack: RunningStack, tenant: str, key_id: str = "k") -> str:
    made = stack.run("tenant", "key", "create", tenant, key_id, "--lifetime", "1h")
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def ask(address: str, key: str = "", **fields: Any) -> list[pb.GenerateEvent] | Failure:
    """A whole request, or why not."""
    request = pb.GenerateRequest(**{"model": SYNTHETIC, "prompt": "once", "max_tokens": 4, **fields})
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(address) as channel:
        try:
            return list(InferenceServiceStub(channel).Generate(request, timeout=30, metadata=metadata))
        except grpc.RpcError as error:
            failure = status.from_rpc_error(error)
            if failure is None:
                raise
            return failure


def reason(answer: list[pb.GenerateEvent] | Failure) -> Reason | None:
    return answer.reason if isinstance(answer, Failure) else None


def test_a_key_is_served_until_it_is_revoked_which_takes_less_than_a_second(
    stack: RunningStack, router: str, tenant: str
) -> None:
    assert reason(ask(router)) is Reason.UNAUTHENTICATED
    assert reason(ask(stack.router)) is None, "the stack's own Router is open"
    secret, spare = make_key(stack, tenant), make_key(stack, tenant, "spare")
    until(lambda: reason(ask(router, spare)) is None)
    answer = ask(router, secret, priority=pb.PRIORITY_CRITICAL)
    assert not isinstance(answer, Failure)
    assert answer[0].accepted.effective_priority == pb.PRIORITY_BATCH
    assert answer[-1].terminal.usage.generated_tokens == 4
    name = f"tenants/{tenant}/keys/k"
    revoked = stack.run("revoke", name, "--reason", "stolen")
    done = time.monotonic()
    assert revoked.returncode == 0, revoked.stderr
    try:
        while reason(ask(router, secret)) is None:
            assert time.monotonic() - done < HONOURED_S, "a revoked key is still served"
        assert reason(ask(router, secret)) is Reason.UNAUTHENTICATED
        assert reason(ask(router, spare)) is None
    finally:
        stack.run("revoke", "--lift", name)
    until(lambda: reason(ask(router, secret)) is None)
    stack.run("tenant", "key", "delete", tenant, "spare")
    until(lambda: reason(ask(router, spare)) is Reason.UNAUTHENTICATED)


def test_a_quota_holds_and_what_is_allowed_can_be_changed_while_it_runs(
    stack: RunningStack, router: str, tenant: str
) -> None:
    secret = make_key(stack, tenant)
    until(lambda: reason(ask(router, secret)) is None)
    stack.run("tenant", "set", tenant, "--requests-per-minute", "1")
    until(lambda: reason(ask(router, secret)) is Reason.QUOTA_EXCEEDED)
    refused = ask(router, secret)
    assert isinstance(refused, Failure)
    assert refused.metadata["tenant"] == f"tenants/{tenant}"
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s <= 120, "with two Routers, half of it is this one's"
    stack.run("tenant", "set", tenant, "--requests-per-minute", "0", "--model", "models/other")
    until(lambda: reason(ask(router, secret)) is Reason.PERMISSION_DENIED)


def test_health_is_closed_to_strangers(router: str) -> None:
    with grpc.insecure_channel(router) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
