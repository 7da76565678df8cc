"""The bootstrap: what it demands of a machine, where it keeps builds, and that it runs with nothing installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from headrace.dev import bootstrap, machine
from headrace.dev.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "services/headrace/dev/bootstrap.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CPU = "processor\t: 0\nvendor_id\t: X\nmodel\t\t: 17\nmodel name\t: Y\nflags\t\t: avx2 fma\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(("version", "says"), [((3, 10), "needs 3.11 or 3.12"), ((3, 13), "this is Python 3.13")])
def test_another_python_is_refused_by_name(version: tuple[int, int], says: str) -> None:
    with pytest.raises(machine.Stop, match=says):
        machine.check_python(version)


@pytest.mark.parametrize(
    ("system", "arch", "glibc", "says"),
    [
        ("Darwin", "arm64", "", "Linux on x86-64 only"),
        ("Linux", "aarch64", "glibc 2.39", "Linux on x86-64 only"),
        ("Linux", "x86_64", "glibc 2.31", "needs glibc 2.35 or newer .* has glibc 2.31"),
        ("Linux", "x86_64", "", "another C library"),
    ],
)
def test_a_platform_without_a_triton_wheel_is_refused(system: str, arch: str, glibc: str, says: str) -> None:
    with pytest.raises(machine.Stop, match=says):
        machine.check_platform(system, arch, glibc)


def test_supported_machines_pass() -> None:
    machine.check_python((3, 11))
    machine.check_python((3, 12))
    machine.check_platform("Linux", "x86_64", "glibc 2.36")


def test_gcc_alone_is_not_a_cxx_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.Stop, match=r"no C\+\+ compiler .* apt install g\+\+"):
        machine.check_compilers({})


def test_no_compiler_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.Stop, match="no C compiler"):
        machine.check_compilers({})


def test_a_cxx_compiler_without_its_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").symlink_to("/bin/true")
    (tmp_path / "g++").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.Stop, match="does not compile a small program"):
        machine.check_compilers({})


def test_a_python_without_its_library_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(machine.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(machine.ctypes.util, "find_library", lambda _name: None)
    assert not machine.has_libpython(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / machine.libpython_name()).touch()
    assert machine.has_libpython(tmp_path)


def test_a_library_that_cannot_be_fetched_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.Stop, match=r"Triton needs libpython3\.\d+\.so\.1\.0, .* apt install libpython3"):
        machine.fetch_libpython(tmp_path)


def test_a_full_disk_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(machine.Stop, match=r"has 1\.0 GB free, and the installation needs 3 GB"):
        machine.check_disk(tmp_path / "not" / "yet")


def test_the_wheel_cache_depends_on_cpu_version_and_flags_but_not_on_the_python() -> None:
    def folder(environ: dict[str, str], cpu: str = CPU) -> Path:
        return bootstrap.wheel_folder(PYPROJECT, {"XDG_CACHE_HOME": "/c", **environ}, cpu)

    assert folder({}) == folder({}, CPU.replace("avx2 fma", "fma avx2"))
    assert folder({}) != folder({}, CPU.replace("avx2", "avx512f"))
    assert folder({}) != folder({"CMAKE_ARGS": "-DGGML_BLAS=ON"})
    assert str(folder({})).startswith("/c/headrace/wheels/llama-cpp-python-0.3.36-py3-")


def test_amx_is_left_out_where_the_cpu_has_it_and_the_users_flags_come_last() -> None:
    amx = CPU.replace("avx2", "amx_tile amx_int8 avx2")
    assert "-mno-amx-int8" not in bootstrap.cmake_args({}, CPU)
    assert "-mno-amx-int8" in bootstrap.cmake_args({}, amx)
    assert bootstrap.cmake_args({"CMAKE_ARGS": "-DX=1"}, amx).endswith(" -DX=1")


def test_a_cached_wheel_is_used_without_a_build(tmp_path: Path) -> None:
    wheel = tmp_path / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl"
    wheel.touch()
    assert bootstrap.build_wheel(tmp_path, "0.3.36", Progress(quiet=True)) == wheel


def test_a_wheel_is_built_into_the_cache_under_its_final_name_only_when_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fake_run(command: list[str], _log: str, on_line: object, environ: dict[str, str]) -> None:
        assert callable(on_line)
        scratch = Path(command[command.index("-w") + 1])
        assert not list(tmp_path.glob("*.whl"))
        on_line("  [70/140] /usr/bin/g++ -c x.cpp")
        (scratch / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl").touch()
        seen.append(environ["CMAKE_ARGS"])

    monkeypatch.setattr(bootstrap, "check_compilers", lambda _environ: None)
    monkeypatch.setattr(bootstrap, "run", fake_run)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    progress = Progress(quiet=True)
    wheel = bootstrap.build_wheel(tmp_path, "0.3.36", progress)
    assert (wheel.exists(), list(tmp_path.iterdir())) == (True, [wheel])
    assert progress.note == "50% (70 of 140 steps)"
    assert seen == [bootstrap.cmake_args({}, bootstrap.read_cpuinfo())]


@pytest.mark.parametrize(("cpus", "memory", "jobs"), [(2, 4 * 10**9, 2), (16, 4 * 10**9, 4), (1, 10**8, 1)])
def test_compilers_fit_into_memory(cpus: int, memory: int, jobs: int) -> None:
    assert bootstrap.build_jobs(cpus, memory) == jobs


def test_a_failed_command_is_one_sentence_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LOGS", tmp_path)
    program = "print('noise'); print('ERROR: no such package'); raise SystemExit(1)"
    with pytest.raises(machine.Stop, match=r"ERROR: no such package .*x\.log"):
        bootstrap.run([sys.executable, "-c", program], "x.log", lambda _line: None)
    assert "noise" in (tmp_path / "x.log").read_text()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["noise", "ERROR: No space left", "ERROR: two"], "ERROR: No space left"),
        (["x.cpp:3:1: error: expected ;", "ninja: stopped"], "x.cpp:3:1: error: expected ;"),
        (
            ["WARNING: Retrying (...) after connection broken by 'NewConnectionError('refused')': /simple",
             "ERROR: Could not find a version that satisfies the requirement x (from versions: none)"],
            "the package index cannot be reached (NewConnectionError): check the network",
        ),
        (["only this"], "only this"),
        ([], "no output"),
    ],
)  # fmt: skip
def test_the_line_that_says_why_is_found(lines: list[str], says: str) -> None:
    assert bootstrap.failure_in(lines) == says


def fresh_checkout(tmp_path: Path) -> Path:
    """What the script needs of a checkout, without an environment."""
    root = tmp_path / "checkout"
    (root / "services/headrace/dev").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("__init__.py", "bootstrap.py", "machine.py", "progress.py"):
        shutil.copy(SCRIPT.parent / name, root / "services/headrace/dev")
    return root


def run_script(root: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(root / "services/headrace/dev/bootstrap.py")],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_it_runs_with_nothing_installed_and_says_what_is_missing(tmp_path: Path) -> None:
    result = run_script(fresh_checkout(tmp_path), PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("bootstrap: no C compiler")


def test_an_unchanged_checkout_takes_a_fraction_of_a_second(tmp_path: Path) -> None:
    root = fresh_checkout(tmp_path)
    (root / ".venv").mkdir()
    write_stamp = (
        "import sys, json; sys.path.insert(0, 'services')\n"
        "from headrace.dev import bootstrap as b\n"
        "extras = [*b.DEFAULT_EXTRAS, 'local-etcd']\n"
        "b.STAMP.write_text(json.dumps({'key': b.stamp_key(dict(b.os.environ)), 'extras': extras}))"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", write_stamp], cwd=root, timeout=30, check=True)
    start = time.monotonic()
    result = run_script(root)
    assert (result.returncode, result.stderr) == (0, "")
    assert time.monotonic() - start < 2.0
