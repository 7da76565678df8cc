"""TLS on the client port: certificates are tenants, are renewed while it runs, and bad files stop the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.control.errors import Reason
from headrace.control.tenants import Tenant
from headrace.rpc.tls import TlsFiles, server_credentials
from headrace.runtime.settings import SettingsError
from router.harness import DEADLINE_S, Harness, collect, failure, open_channel, running
from router.test_tenants import ACME, ACME_KEY, bearer, publish
from support.pki import Authority, Pair

BY_URI = Tenant("tenants/by-uri", certificate_names=("spiffe://fleet/api",))
BY_DNS = Tenant("tenants/by-dns", certificate_names=("batch.example",))
BY_NAME = Tenant("tenants/by-name", certificate_names=("worker 7",))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> dict[str, str]:
    """Settings of TLS without client certificates."""
    certificate, key = authority.sign("localhost").write(tmp_path, "server")
    return {"tls_certificate": certificate, "tls_key": key}


@pytest.fixture
def mutual(files: dict[str, str], authority: Authority, tmp_path: Path) -> dict[str, str]:
    """And with them."""
    path = tmp_path / "clients.pem"
    path.write_bytes(authority.certificate)
    return {**files, "tls_client_ca": str(path)}


async def tenant_of(h: Harness, credentials: grpc.ChannelCredentials, *metadata: Any) -> str:
    """What the Scheduler is told of a call over a connection of its own."""
    async with open_channel(h.target, credentials) as channel:
        request = pb.GenerateRequest(model="chat", prompt="hello")
        call = InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S, metadata=metadata)
        answer = asyncio.create_task(collect(call))
        dispatched = asyncio.create_task(h.scheduler.dispatches.get())
        await asyncio.wait((answer, dispatched), return_when=asyncio.FIRST_COMPLETED)
        if not dispatched.done():
            dispatched.cancel()
            error = (await answer)[1]
            assert error is not None
            raise error
        dispatch = await dispatched
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.end(dispatch.attempt, stop=pb.StopMatch(eos_token_id=7))
        assert (await answer)[1] is None
        return str(dispatch.tenant)


@pytest.fixture
async def closed(mutual: dict[str, str], authority: Authority) -> AsyncIterator[Harness]:
    """A Router that wants client certificates of known tenants."""
    someone = authority.client(authority.sign("someone"))
    async with running(credentials=someone, authentication="required", **mutual) as h:
        publish(h, ACME, BY_URI, BY_DNS, BY_NAME)
        yield h


@pytest.mark.parametrize(
    ("common_name", "uris", "dns", "tenant"),
    [
        ("any", ("spiffe://fleet/api",), (), "tenants/by-uri"),
        ("any", ("spiffe://fleet/other",), ("batch.example",), "tenants/by-dns"),
        ("worker 7", (), (), "tenants/by-name"),
    ],
)
async def test_a_certificate_is_its_tenant(
    closed: Harness, authority: Authority, common_name: str, uris: tuple[str, ...], dns: tuple[str, ...], tenant: str
) -> None:
    pair = authority.sign(common_name, uris=uris, dns=dns)
    assert await tenant_of(closed, authority.client(pair)) == tenant


async def test_a_key_counts_before_a_certificate(closed: Harness, authority: Authority) -> None:
    shown = authority.client(authority.sign("any", uris=("spiffe://fleet/api",)))
    assert await tenant_of(closed, shown, *bearer(ACME_KEY)) == "tenants/acme"


@pytest.mark.parametrize(
    ("common_name", "uris", "dns", "reason"),
    [
        ("nobody", (), (), Reason.UNAUTHENTICATED),
        ("worker 7", (), ("other.example",), Reason.UNAUTHENTICATED),
        ("any", ("spiffe://fleet/api",), ("batch.example",), Reason.PERMISSION_DENIED),
    ],
    ids=["of no tenant", "the common name counts only alone", "of two tenants"],
)
async def test_a_certificate_that_is_nobodys_is_refused(
    closed: Harness,
    authority: Authority,
    common_name: str,
    uris: tuple[str, ...],
    dns: tuple[str, ...],
    reason: Reason,
) -> None:
    pair = authority.sign(common_name, uris=uris, dns=dns)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tenant_of(closed, authority.client(pair))
    assert failure(caught.value).reason is reason


async def test_without_a_certificate_of_the_authority_there_is_no_connection(
    closed: Harness, authority: Authority
) -> None:
    forged = Authority("another").sign("any", uris=("spiffe://fleet/api",))
    for pair in (None, forged):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tenant_of(closed, authority.client(pair))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert closed.scheduler.dispatches.empty()


async def test_tls_without_client_certificates_carries_keys(files: dict[str, str], authority: Authority) -> None:
    async with running(credentials=authority.client(None), authentication="required", **files) as h:
        publish(h, ACME, BY_NAME)
        assert await tenant_of(h, authority.client(None), *bearer(ACME_KEY)) == "tenants/acme"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tenant_of(h, authority.client(authority.sign("worker 7")))
        assert failure(caught.value).reason is Reason.UNAUTHENTICATED, "nobody has checked that certificate"


async def test_renewed_files_are_taken_over_and_half_renewed_ones_are_not(
    files: dict[str, str], authority: Authority
) -> None:
    async with running(credentials=authority.client(None), **files) as h:
        fresh = Authority("the next one")
        renewed = fresh.sign("localhost")
        replace_file(files["tls_key"], renewed.key)
        assert await tenant_of(h, authority.client(None)) == "tenants/anonymous", "the certificate is still the old one"
        replace_file(files["tls_certificate"], renewed.certificate)
        assert await tenant_of(h, fresh.client(None)) == "tenants/anonymous"
        with pytest.raises(grpc.aio.AioRpcError):
            await tenant_of(h, authority.client(None))


def replace_file(path: str, data: bytes) -> None:
    """As tools that renew certificates do."""
    new = Path(f"{path}.new")
    new.write_bytes(data)
    new.replace(path)


def test_without_files_there_is_no_tls() -> None:
    assert server_credentials(TlsFiles("", ""), "router") is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"certificate": ""}, "router setting 'tls_certificate': TLS needs it"),
        ({"key": ""}, "router setting 'tls_key': TLS needs it"),
        ({"key": "{folder}/none.key"}, "router setting 'tls_key': cannot read .*none.key: No such file"),
        ({"certificate": "{folder}"}, "router setting 'tls_certificate': cannot read .*: Is a directory"),
        ({"key": "{folder}/other.key"}, "router setting 'tls_key': .*other.key is no unencrypted PEM key of the"),
        ({"key": "{folder}/locked.key"}, "router setting 'tls_key': .*locked.key is no unencrypted PEM key of the"),
        ({"client_ca": "{folder}/server.key"}, "router setting 'tls_client_ca': .*server.key holds no PEM"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start_and_name_the_setting(
    authority: Authority, tmp_path: Path, wrong: dict[str, str], words: str
) -> None:
    certificate, key = authority.sign("localhost").write(tmp_path, "server")
    authority.sign("other").write(tmp_path, "other")
    (tmp_path / "locked.key").write_bytes(_locked(authority.sign("localhost")))
    changes = {name: path.format(folder=tmp_path) for name, path in wrong.items()}
    with pytest.raises(SettingsError, match=words):
        server_credentials(TlsFiles(**{"certificate": certificate, "key": key, **changes}), "router")


def _locked(pair: Pair) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pair.key, None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
