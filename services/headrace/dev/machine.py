"""What this machine must have before anything is installed. Standard library only.

Each check says what is missing and what to do, in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

VERSIONS = ((3, 12), (3, 11))
GLIBC_MIN = (2, 35)  # nvidia-pytriton's wheel is tagged manylinux_2_35
DISK_MIN_GB = 3.0  # environment 1 GB, pip's temporary copies, the build tree of llama.cpp


class Stop(Exception):
    """The machine lacks something; the message is one sentence that says what to do."""


def check_python(version: tuple[int, int]) -> None:
    """Refuse a Python that the dependencies have no wheels for."""
    if version not in VERSIONS:
        raise Stop(
            f"this is Python {version[0]}.{version[1]}, and Headrace needs 3.11 or 3.12: "
            "install one (apt install python3.12) and run make PYTHON=python3.12"
        )


def check_platform(system: str, machine: str, glibc: str) -> None:
    """Refuse a platform that Triton's wheel does not run on."""
    if (system, machine) != ("Linux", "x86_64"):
        raise Stop(f"Triton's package exists for Linux on x86-64 only, and this is {system} on {machine}")
    found = re.match(r"glibc (\d+)\.(\d+)", glibc)
    if not found or (int(found[1]), int(found[2])) < GLIBC_MIN:
        raise Stop(
            f"Triton's package needs glibc {GLIBC_MIN[0]}.{GLIBC_MIN[1]} or newer (Debian 12, Ubuntu 22.04), "
            f"and this system has {glibc or 'another C library'}"
        )


def check_venv_module() -> None:
    """Debian splits ensurepip off; without it `python -m venv` fails half way."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Stop("this Python cannot create virtual environments: apt install python3-venv") from None


def check_compilers(environ: dict[str, str]) -> None:
    """A C compiler alone is not enough: llama.cpp is C++, so a small C++ program must compile."""
    if not shutil.which(environ.get("CC", "").split(" ")[0] or "cc") and not shutil.which("gcc"):
        raise Stop("no C compiler was found, and llama.cpp is built on this machine: apt install g++")
    names = [environ["CXX"].split(" ")[0]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(name)), None)
    if compiler is None:
        raise Stop("no C++ compiler was found (gcc alone is not enough for llama.cpp): apt install g++")
    with tempfile.TemporaryDirectory() as scratch:
        program = "#include <vector>\nint main() { return std::vector<int>().size(); }\n"
        result = subprocess.run(
            [compiler, "-x", "c++", "-", "-o", str(Path(scratch) / "probe")],
            input=program.encode(), capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    if result.returncode != 0:
        raise Stop(f"the C++ compiler {compiler} does not compile a small program: apt install g++")


def libpython_name() -> str:
    """File name of this Python's shared library, which Triton's Python backend links to."""
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def has_libpython(venv: Path) -> bool:
    """Whether it is where headrace.triton.workspace looks: beside this Python, in `venv`, or on the system."""
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib"), venv / "lib"]
    if any(folder and Path(folder, libpython_name()).is_file() for folder in folders):
        return True
    return ctypes.util.find_library(libpython_name()[3:].partition(".so")[0]) is not None


def fetch_libpython(venv: Path) -> None:
    """Put the library into `venv` from its Debian package, which takes no root and changes nothing else.

    Debian's python3 is linked statically, so a fresh system has no libpython.

    Raises:
        Stop: apt is not here or does not know the package.
    """
    package = libpython_name().partition(".so")[0]
    with tempfile.TemporaryDirectory() as scratch:
        for name in (package, f"{package}t64"):  # the second is Ubuntu 24.04's
            for command in (["apt-get", "download", "-qq", name], ["sh", "-c", "dpkg-deb -x ./*.deb out"]):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(command, cwd=scratch, capture_output=True, timeout=120, check=False)
            found = next(Path(scratch).glob(f"out/usr/lib/**/{libpython_name()}"), None)
            if found:
                shutil.copy(found, venv / "lib" / libpython_name())
                return
    raise Stop(f"Triton needs {libpython_name()}, which this Python comes without: apt install {package}")


def check_disk(*folders: Path) -> None:
    """Refuse to start what would end in 'No space left on device' minutes later."""
    for folder in folders:
        there = next(parent for parent in [folder, *folder.parents] if parent.exists())
        free_gb = shutil.disk_usage(there).free / 1e9
        if free_gb < DISK_MIN_GB:
            raise Stop(f"{there} has {free_gb:.1f} GB free, and the installation needs {DISK_MIN_GB:.0f} GB")


def usable_python() -> str | None:
    """Another interpreter on this machine that will do, when the one that runs this will not."""
    for version in VERSIONS:
        path = shutil.which(f"python{version[0]}.{version[1]}")
        if path:
            probe = [path, "-c", "import sys, ensurepip; print(sys.version_info[:2])"]
            result = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
            if result.stdout.strip() == str(version):
                return path
    return None
