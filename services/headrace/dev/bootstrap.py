"""Make this checkout runnable: its own `.venv`, llama.cpp built for this CPU, the project installed.

    python3 services/headrace/dev/bootstrap.py [--extra dev]

Standard library only: this is the first thing that runs on a fresh machine. `make` calls it before every
target that needs the environment; when nothing has changed it ends in a fraction of a second.
The llama.cpp wheel is kept outside the checkout, so a second clone does not build it again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Iterator  # noqa: UP035  read by interpreters that are about to be refused

ROOT = Path(__file__).resolve().parents[3]
if not __package__:  # run as a file: nothing is installed yet
    sys.path.insert(0, str(ROOT / "services"))

from headrace.dev.machine import (  # noqa: E402
    VERSIONS,
    Stop,
    check_compilers,
    check_disk,
    check_platform,
    check_python,
    check_venv_module,
    fetch_libpython,
    has_libpython,
    usable_python,
)
from headrace.dev.progress import Progress  # noqa: E402

VENV = ROOT / ".venv"
STAMP = VENV / "headrace-bootstrap.json"
LOGS = ROOT / "build" / "logs"
PHASE_LIMIT_S = 3600.0
DEFAULT_EXTRAS = ("worker-cpu", "demo-model")
# Only libllama is used; its multimodal library would be a quarter of the build.
CMAKE_ARGS = "-DLLAVA_BUILD=OFF"
# On a CPU with AMX, ggml as built by GCC 12 dies of an illegal instruction at its first prompt of many tokens.
NO_AMX = "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"


# The llama.cpp wheel


def cache_home(environ: dict[str, str]) -> Path:
    """Where builds and models are kept between checkouts."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def cpu_identity(cpuinfo: str) -> str:
    """What -march=native depends on: the model and its feature flags, not the number of cores."""
    first = cpuinfo.partition("\n\n")[0]
    facts = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*: (.*)$", first, re.MULTILINE))
    facts["flags"] = " ".join(sorted(facts.get("flags", platform.processor()).split()))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def llama_version(pyproject: dict[str, Any]) -> str:
    """The version that the worker-cpu extra pins."""
    for requirement in pyproject["project"]["optional-dependencies"]["worker-cpu"]:
        found = re.fullmatch(r"llama-cpp-python==([\w.]+)", requirement)
        if found:
            return found[1]
    raise Stop("pyproject.toml no longer pins llama-cpp-python in worker-cpu")


def wheel_folder(pyproject: dict[str, Any], environ: dict[str, str], cpuinfo: str) -> Path:
    """Folder of the wheel for this version, this CPU and these build flags; it works with any Python 3."""
    flags = hashlib.sha256(cmake_args(environ, cpuinfo).encode()).hexdigest()[:8]
    name = f"llama-cpp-python-{llama_version(pyproject)}-py3-{cpu_identity(cpuinfo)}-{flags}"
    return cache_home(environ) / "wheels" / name


def cmake_args(environ: dict[str, str], cpuinfo: str) -> str:
    """Our build flags, then the user's, which win."""
    ours = f"{CMAKE_ARGS} {NO_AMX}" if has_amx(cpuinfo) else CMAKE_ARGS
    return f"{ours} {environ.get('CMAKE_ARGS', '')}".strip()


def has_amx(cpuinfo: str) -> bool:
    """Whether the CPU has AMX, which -march=native would then use."""
    return re.search(r"^flags\s*:.*\bamx_tile\b", cpuinfo, re.MULTILINE) is not None


def build_jobs(cpus: int, memory_bytes: int) -> int:
    """Compilers at a time: one a core, but one needs up to 1 GB of memory."""
    return max(1, min(cpus, memory_bytes // 10**9))


def ninja_percent(line: str) -> str | None:
    """Progress that ninja prints as '[n/m]'."""
    found = re.match(r"\s*\[(\d+)/(\d+)\] ", line)
    if not found:
        return None
    return f"{100 * int(found[1]) // int(found[2])}% ({found[1]} of {found[2]} steps)"


def build_wheel(folder: Path, version: str, progress: Progress) -> Path:
    """Build the wheel into the cache unless it is there; a half-built one never gets its final name."""
    ready = sorted(folder.glob("llama_cpp_python-*.whl"))
    if ready:
        return ready[0]
    check_compilers(dict(os.environ))
    folder.mkdir(parents=True, exist_ok=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    environ = {**os.environ, "CMAKE_ARGS": cmake_args(dict(os.environ), read_cpuinfo())}
    environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(build_jobs(os.cpu_count() or 1, memory)))

    def note(line: str) -> None:
        progress.note = ninja_percent(line) or progress.note or "fetching the sources"

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = _pip("wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python",
                       "-w", scratch, f"llama-cpp-python=={version}")  # fmt: skip
        with progress.phase("building llama.cpp for this CPU (once; 3 to 6 minutes on 2 cores)"):
            run(command, "llama.log", note, environ)
        built = next(Path(scratch).glob("*.whl"))
        return built.replace(folder / built.name)


# The environment


def _pip(*arguments: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run(command: list[str], log: str, on_line: Callable[[str], None], environ: dict[str, str] | None = None) -> None:
    """Run a command with its output in build/logs; each line is also shown to `on_line`."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / log
    with (
        path.open("w", encoding="utf-8", errors="replace") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environ, cwd=ROOT,
        ) as process,
    ):  # fmt: skip
        watchdog = threading.Timer(PHASE_LIMIT_S, process.kill)
        watchdog.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                on_line(line)
            code = process.wait(timeout=60)
        except BaseException:
            process.kill()
            raise
        finally:
            watchdog.cancel()
    if code != 0:
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        raise Stop(f"{_named(command)} failed: {failure_in(lines)} (all of it: {path})")


def failure_in(lines: list[str]) -> str:
    """The line of a log that says why, in the order in which tools say it."""
    unreachable = [line for line in lines if line.startswith("WARNING: Retrying")]
    errors = [line for line in lines if re.match(r"(ERROR|error|fatal error|.*: error:)", line)]
    if unreachable and any("from versions: none" in line for line in errors):
        cause = re.search(r"broken by '?(\w+)\((.*?)[,)]", unreachable[0])
        return f"the package index cannot be reached{f' ({cause[1]})' if cause else ''}: check the network"
    return (errors or [line for line in lines if line] or ["no output"])[0]


def _named(command: list[str]) -> str:
    if command[1:3] == ["-m", "pip"]:
        return f"pip {next(word for word in command[3:] if not word.startswith('-'))}"
    return " ".join([Path(command[0]).name, *command[1:3]])


def create_venv(progress: Progress) -> None:
    """Create `.venv`, or replace one whose Python is gone or another version."""
    probe = [str(VENV / "bin" / "python"), "-c", "import sys, pip; print(sys.version_info[:2])"]
    with contextlib.suppress(OSError):
        result = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
        if result.stdout.strip() == str(sys.version_info[:2]):
            return
    if VENV.is_symlink():
        raise Stop(f"{VENV} is a link to an environment of another Python: remove the link, then try again")
    with progress.phase("creating the virtual environment .venv"):
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], "venv.log", lambda _line: None)


def install(extras: list[str], wheel: Path | None, progress: Progress) -> None:
    """Install the project, editable, with its extras."""

    def note(line: str) -> None:
        words = line.split()
        if words[:1] == ["Collecting"]:
            progress.note = words[1]
        elif words[:1] == ["Downloading"]:
            progress.note = f"{words[1].rsplit('/', 1)[-1]} {' '.join(words[2:4])}"
        elif words[:2] == ["Installing", "collected"]:
            progress.note = f"unpacking {len(words) - 3} packages"

    targets = ([str(wheel)] if wheel else []) + ["-e", f".[{','.join(extras)}]"]
    with progress.phase("installing Headrace, Triton and the other packages"):
        if wheel:  # even over the same version: it may be a build for another CPU, or with other flags
            run(_pip("install", "--no-deps", "--force-reinstall", str(wheel)), "pip.log", note)
        run(_pip("install", "--progress-bar", "off", *targets), "pip.log", note)


def stamp_key(environ: dict[str, str]) -> str:
    """Whatever changes the environment's content changes this."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    facts = [sys.version, str(ROOT), cmake_args(environ, read_cpuinfo()), str(bool(shutil.which("etcd")))]
    digest.update("\0".join(facts).encode())
    digest.update(cpu_identity(read_cpuinfo()).encode())
    return digest.hexdigest()


def read_cpuinfo() -> str:
    """The kernel's description of the CPU; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ""


def read_stamp() -> dict[str, Any]:
    """What the last complete run installed."""
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
        if isinstance(stamp, dict):
            return stamp
    return {}


def _lock_before(lock: IO[str], deadline: float) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)
    raise Stop("another bootstrap of this checkout has not ended within an hour: look for it and end it")


@contextlib.contextmanager
def only_one(progress: Progress) -> Iterator[None]:
    """Two `make` at a time take turns."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "bootstrap.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with progress.phase("waiting for another bootstrap of this checkout"):
                _lock_before(lock, time.monotonic() + PHASE_LIMIT_S)
        yield


def bootstrap(extras: list[str], progress: Progress) -> None:
    """Do what is not done yet."""
    environ = dict(os.environ)
    if not shutil.which("etcd"):
        extras = [*extras, "local-etcd"]
    stamp, key = read_stamp(), stamp_key(environ)
    if stamp.get("key") == key and set(extras) <= set(stamp.get("extras", [])):
        return
    # What a developer has installed before stays when the demo is run again.
    extras = sorted({*extras, *stamp.get("extras", [])})
    check_platform(platform.system(), platform.machine(), " ".join(platform.libc_ver()))
    check_venv_module()
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = wheel_folder(pyproject, environ, read_cpuinfo())
    if not any(folder.glob("*.whl")):
        check_compilers(environ)
    check_disk(VENV, cache_home(environ), Path(tempfile.gettempdir()))
    if not progress.quiet:
        sys.stderr.write(f"Setting up {VENV} (logs: {LOGS})\n")
    create_venv(progress)
    STAMP.unlink(missing_ok=True)
    if not has_libpython(VENV):
        with progress.phase("fetching this Python's shared library"):
            fetch_libpython(VENV)
    wheel = build_wheel(folder, llama_version(pyproject), progress) if "worker-cpu" in extras else None
    install(extras, wheel, progress)
    STAMP.write_text(json.dumps({"key": key, "extras": extras}), encoding="utf-8")


def main() -> int:
    """Parse the arguments, and turn what is missing into one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], metavar="NAME", help="an extra of pyproject.toml")
    parser.add_argument("--quiet", action="store_true", help="say only what failed")
    arguments = parser.parse_args()
    progress = Progress(quiet=arguments.quiet)
    try:
        if sys.version_info[:2] not in VERSIONS:
            other = usable_python()
            if other:
                os.execv(other, [other, *sys.argv])  # noqa: S606
        check_python(sys.version_info[:2])
        with only_one(progress):
            bootstrap([*DEFAULT_EXTRAS, *arguments.extra], progress)
    except Stop as problem:
        sys.stderr.write(f"bootstrap: {problem}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"bootstrap: {error.filename or 'the system'}: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("bootstrap: interrupted; run it again to go on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
