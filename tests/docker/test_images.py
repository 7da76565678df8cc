"""What an image is made of: locked packages, a Dockerfile that keeps the rules, etcd's user. No image is built here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docker.manifests import DOCKER, ROOT
from headrace.adapters.etcd import AccessDenied, EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.cli.serve import service_settings
from headrace.runtime.settings import load_settings
from support.etcd import etcd_process

ETCD_AUTH = DOCKER / "etcd_auth.py"
FINAL = ("router", "registry", "scheduler", "worker-cpu", "worker-gpu")


def script(name: str) -> ModuleType:
    """A program of docker/, imported."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = script("lock")


def stages() -> dict[str, tuple[str, str]]:
    """Base and text of each stage of docker/Dockerfile."""
    text = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def chain(name: str) -> str:
    """The text of a final image's stage and of those that it is made from."""
    base, body = stages()[name]
    return (chain(base) if base in stages() else "") + body


@pytest.mark.parametrize("name", lock.FILES)
def test_every_requirement_is_locked_to_a_version_that_it_allows(name: str) -> None:
    """Newer versions here than in the lock are no failure: the lock is renewed on purpose."""
    text = (lock.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))
    assert len(locked) == len([line for line in text.splitlines() if not line.startswith("#")])
    left_out = lock.LEFT_OUT.get(name, set()) | lock.BUILT_HERE
    wanted = {canonicalize_name(r.name): r for r in lock.requirements(lock.FILES[name]) if r.name not in left_out}
    assert wanted.keys() <= locked.keys(), "run docker/lock.py"
    for package, requirement in wanted.items():
        assert requirement.specifier.contains(locked[package], prereleases=True), (package, locked[package])


def test_the_lock_takes_what_is_needed_by_what_is_needed() -> None:
    found = lock.closure([Requirement("rich")])
    assert {"rich", "pygments", "markdown-it-py", "mdurl"} == set(found)


def test_router_and_registry_never_import_what_their_image_lacks() -> None:
    absent = ["tritonclient", "numpy", "pytriton", "llama_cpp", "jinja2", "pytest"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import headrace.router.main, headrace.registry.main, headrace.cli.main as m, importlib\n"
        "for command in m._COMMANDS.values(): importlib.import_module(command.partition(':')[0])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", FINAL)
def test_an_image_runs_as_nobody_stops_in_order_and_can_be_asked(name: str) -> None:
    body, whole = stages()[name][1], chain(name)
    assert re.findall(r"^USER (.*)$", body, re.MULTILINE)[-1] == "10001:10001"
    assert body.index("USER 10001") < body.index("HEALTHCHECK")
    assert re.search(r'^HEALTHCHECK .*CMD \["headrace", "health",', body, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in whole
    for label in ("title", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in whole


@pytest.mark.parametrize("name", FINAL)
def test_an_images_own_settings_load_and_its_ports_are_theirs(name: str) -> None:
    service = name if name in {"router", "registry"} else "scheduler"
    prefix = f"HEADRACE_{service.upper()}_"
    environ = dict(re.findall(r"(HEADRACE_\w+)=(\S+)", chain(name)))
    settings: Any = load_settings(service_settings(service), service, environ=environ)
    assert set(environ) <= {prefix + field.upper() for field in type(settings).model_fields}
    ports = [str(getattr(settings, setting)).rpartition(":")[2] for setting in ("listen", "metrics_listen")]
    assert re.findall(r"^EXPOSE (.*)$", stages()[name][1], re.MULTILINE) == [" ".join(ports)]
    if name == "worker-gpu":
        assert settings.engines == ("tensorrt_llm",)


@pytest.mark.parametrize("name", FINAL)
def test_no_build_tool_is_in_an_image_that_is_shipped(name: str) -> None:
    installed = re.findall(r"apt-get install ([^&]*)", chain(name))
    words = {word for line in installed for word in line.split() if not word.startswith("-")}
    assert words <= {"python3", "libgomp1", "libpython3.11"}
    assert "pip" not in chain(name)
    assert "ADD " not in chain(name)


def test_what_changes_often_comes_last() -> None:
    for name in ("router", "registry", "scheduler", "worker-cpu"):
        copies = re.findall(r"^COPY --from=(\S+) ", stages()[name][1], re.MULTILINE)
        assert copies[-1] == "code", copies
    for name in ("router-env", "scheduler-env", "worker-env"):
        assert "services" not in stages()[name][1], "packages must not be installed again when code changes"


def test_nothing_of_this_machine_gets_into_an_image() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("RUN") and "apt-get update" in line:
            assert "type=secret,id=apt" in line
        if line.startswith("RUN") and re.search(r"pip .*install -r|pip wheel --no-deps", line):
            assert "type=secret,id=pip" in line
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*", "only what is named is sent"


# etcd's user


def enable(
    endpoint: str, folder: Path, *, root: str = "r00t", password: str = "pa55"
) -> subprocess.CompletedProcess[str]:
    for name, value in (("root", root), ("password", password)):
        (folder / name).write_text(f"{value}\n")
    files = ["--root-password-file", str(folder / "root"), "--password-file", str(folder / "password")]
    command = [sys.executable, str(ETCD_AUTH), endpoint, *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_etcd_gets_one_user_who_may_do_what_headrace_needs(tmp_path: Path) -> None:
    def store(user: str = "", password: str = "", prefix: str = "/headrace") -> EtcdStore:
        return EtcdStore(EtcdConfig((etcd.endpoint,), prefix=prefix, username=user, password=password))

    async with etcd_process(tmp_path / "etcd") as etcd:
        first = enable(etcd.endpoint, tmp_path)
        assert (first.returncode, first.stdout) == (
            0, "etcd_auth: authentication is on now; user headrace may use /headrace/\n",
        ), first.stderr  # fmt: skip
        ours = store("headrace", "pa55")
        await ours.put("k", b"v")
        found = await ours.get("k")
        assert found is not None
        assert found.value == b"v"
        for other in (store("headrace", "pa55", prefix="/elsewhere"), store()):
            with pytest.raises(AccessDenied):
                await other.put("k", b"v")
            await other.aclose()
        again = enable(etcd.endpoint, tmp_path, password="new")
        assert "authentication was on" in again.stdout
        renewed = store("headrace", "new")
        assert await renewed.get("k") is not None
        wrong = enable(etcd.endpoint, tmp_path, root="guess")
        assert wrong.returncode == 1
        assert "guess" not in wrong.stderr
        for used in (ours, renewed):
            await used.aclose()


def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    refused = enable("127.0.0.1:9", tmp_path, password="")
    assert (refused.returncode, refused.stderr) == (1, "etcd_auth: a password file is empty\n")
