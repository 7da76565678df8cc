"""TLS with certificates on both sides, and users with roles."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aetcd.rpc import auth_pb2, rpc_pb2

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdSettings
from headrace.adapters.etcd_transport import AccessDenied
from headrace.runtime.settings import SettingsError, load_settings
from support.etcd import Etcd, etcd_process, eventually

PASSWORD = "correct-horse-battery"


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(folder, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "2", "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
    return folder


async def test_a_store_with_certificates_on_both_sides(tmp_path: Path, certificates: Path) -> None:
    flags = (
        f"--cert-file={certificates / 'server.pem'}",
        f"--key-file={certificates / 'server.key'}",
        f"--trusted-ca-file={certificates / 'ca.pem'}",
        "--client-cert-auth",
    )
    async with etcd_process(tmp_path / "etcd", arguments=flags) as etcd:
        settings: dict[str, Any] = {
            "etcd": etcd.endpoint,
            "etcd_ca_file": str(certificates / "ca.pem"),
            "etcd_cert_file": str(certificates / "client.pem"),
            "etcd_key_file": str(certificates / "client.key"),
        }
        store = await EtcdStore.connect(load_settings(EtcdSettings, "router", overrides=settings), "router")
        assert await store.put("k", b"v") > 0
        await store.aclose()
        without = load_settings(EtcdSettings, "router", overrides={"etcd": etcd.endpoint})
        with pytest.raises(SettingsError, match="cannot reach etcd"):
            await EtcdStore.connect(without, "router", timeout_s=0.5)


async def enable_auth(store: EtcdStore, folder: Path) -> Callable[..., EtcdSettings]:
    """Create root and a user whose role covers /headrace/; returns what makes settings of a user."""

    async def call(name: str, request: Any) -> None:
        reply = getattr(rpc_pb2, type(request).__name__.replace("Request", "Response"))
        await store._unary(f"Auth/{name}", request, reply, 5)

    everything = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=b"/headrace/", range_end=b"/headrace0")
    await call("UserAdd", rpc_pb2.AuthUserAddRequest(name="root", password="root"))
    await call("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
    await call("UserAdd", rpc_pb2.AuthUserAddRequest(name="router", password=PASSWORD))
    await call("RoleAdd", rpc_pb2.AuthRoleAddRequest(name="headrace"))
    await call("RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name="headrace", perm=everything))
    await call("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="router", role="headrace"))
    await call("AuthEnable", rpc_pb2.AuthEnableRequest())

    def settings(password: str, **more: str) -> EtcdSettings:
        (folder / "password").write_text(password + "\n")
        overrides = {"etcd_username": "router", "etcd_password_file": str(folder / "password"), **more}
        return load_settings(EtcdSettings, "router", overrides=overrides)

    return settings


async def test_a_user_reads_writes_and_watches_and_gets_a_new_token(
    etcd: Etcd, store: EtcdStore, tmp_path: Path
) -> None:
    settings = await enable_auth(store, tmp_path)
    with pytest.raises(AccessDenied):
        await store.get("k")
    ours = await EtcdStore.connect(settings(PASSWORD, etcd=etcd.endpoint), "router")
    await ours.put("k", b"v")
    lease, _ = await ours.lease_grant(30)
    assert await ours.lease_keepalive(lease) == 30
    ours._transport._token = "an-old-token.1"  # what an expiry or a restart of etcd makes of it
    assert (await ours.get("k")) is not None
    assert ours._transport._token != "an-old-token.1"
    listing = await ours.range("")
    assert [kv.key for kv in listing.items] == ["incarnation", "k"]
    await etcd.kill()
    await etcd.start(wait_ready=False)
    await eventually(lambda: _answers(ours))
    await ours.aclose()


async def test_a_user_without_the_role_or_with_another_password_is_told_so(
    etcd: Etcd, store: EtcdStore, tmp_path: Path
) -> None:
    settings = await enable_auth(store, tmp_path)
    with pytest.raises(SettingsError, match=r"^router setting 'etcd_username': .* permission") as caught:
        await EtcdStore.connect(settings(PASSWORD, etcd=etcd.endpoint, etcd_prefix="/elsewhere"), "router")
    with pytest.raises(SettingsError, match=r"^router setting 'etcd_username': .* password") as caught:
        await EtcdStore.connect(settings("wrong-one", etcd=etcd.endpoint), "router")
    assert "wrong-one" not in str(caught.value)
    assert PASSWORD not in repr(settings(PASSWORD, etcd=etcd.endpoint))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"etcd_username": "u"}, "etcd_password_file"),
        ({"etcd_cert_file": "/c", "etcd_ca_file": "/ca"}, "etcd_key_file"),
        ({"etcd_ca_file": "/nowhere/ca.pem"}, "'etcd_ca_file': cannot read /nowhere/ca.pem"),
    ],
)
async def test_settings_that_need_others_say_so(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        await EtcdStore.connect(load_settings(EtcdSettings, "router", overrides=values), "router")


async def _answers(store: EtcdStore) -> bool:
    try:
        return await store.get("k", timeout_s=1) is not None
    except AccessDenied:
        raise
    except Exception:
        return False
