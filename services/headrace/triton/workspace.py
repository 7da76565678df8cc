"""Where the Triton of the nvidia-pytriton wheel is started from.

The wheel keeps `tritonserver` and one stub of the Python backend for each minor version of Python. Triton wants
the stub beside the backend, so server and stub are copied once to a private directory; site-packages is
never written to. The wheel's bundled libraries (115 MB) are used where they are.

Without the wheel, the Triton of NVIDIA's images is used as it is: below /opt/tritonserver, with its own Python. Never
run by us: those images could not be had where this was written.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.runtime.settings import SettingsError

DISTRIBUTION = "nvidia-pytriton"
DEFAULT_CACHE_DIR = Path("~/.cache/headrace")
IMAGE_TRITON = Path("/opt/tritonserver")
"""Where NVIDIA's images have bin/tritonserver, backends/ and caches/."""
IMAGE_PYTHON = Path("/usr/bin")
"""And the python3 with the packages of its engines."""
IMAGE_PACKAGES = ("/usr/local/lib/python3.12/dist-packages", "/usr/lib/python3/dist-packages")
"""And where that one has them."""


@dataclass(frozen=True, slots=True)
class TritonFiles:
    """What one start of tritonserver needs on disk."""

    root: Path
    """The private copy: bin/, backends/, caches/."""
    library_path: tuple[Path, ...]
    """Directories for LD_LIBRARY_PATH, first found first: the wheel's libraries, then libpython's."""
    python: Path | None = None
    """Directory of the python3 that engines run in; None: that of this interpreter."""

    @property
    def server(self) -> Path:
        """The executable."""
        return self.root / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        """For --backend-directory."""
        return self.root / "backends"

    @property
    def caches(self) -> Path:
        """For --cache-directory."""
        return self.root / "caches"


def prepare_triton(cache_dir: Path) -> TritonFiles:
    """Return a Triton ready to start, copying it below `cache_dir` the first time (30 MB, seconds).

    Safe beside other processes that do the same: the copy appears by one rename.

    Raises:
        SettingsError: nvidia-pytriton or its stub for this Python is not installed, or the copy cannot be made.
    """
    if has_image_triton():
        return TritonFiles(root=IMAGE_TRITON, library_path=(), python=IMAGE_PYTHON)
    version, package = _installed()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "tritonserver" / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise SettingsError(f"{DISTRIBUTION} {version} has no Python backend for Python {python}; use 3.11 or 3.12")
    target = cache_dir.expanduser() / "triton" / f"{version}-py{python}"
    if not target.is_dir():
        try:
            _copy(package / "tritonserver", stub, target)
        except OSError as error:
            raise SettingsError(f"setting 'cache_dir': cannot write {target}: {error.strerror}") from None
    return TritonFiles(root=target, library_path=(package.parent / "nvidia_pytriton.libs", *_libpython(python)))


def has_image_triton() -> bool:
    """Whether the Triton of NVIDIA's image is the one that is started."""
    return importlib.util.find_spec("pytriton") is None and (IMAGE_TRITON / "bin" / "tritonserver").is_file()


def find_model_repository(setting: Path | None) -> Path:
    """Return the model repository that holds `llm`: the setting's, a source checkout's, or the installed one.

    Raises:
        SettingsError: none of them has llm/config.pbtxt.
    """
    here = Path(__file__).resolve()
    if setting is not None:
        candidates = [setting.expanduser().resolve()]
    else:
        candidates = [here.parents[3] / "model_repo", here.parents[1] / "model_repo"]
    for candidate in candidates:
        if (candidate / "llm" / "config.pbtxt").is_file():
            return candidate
    tried = " or ".join(str(candidate) for candidate in candidates)
    raise SettingsError(f"setting 'model_repository': there is no llm/config.pbtxt in {tried}")


def _installed() -> tuple[str, Path]:
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    # The spec is looked up without an import: pytriton itself pulls in a server framework of its own.
    spec = importlib.util.find_spec("pytriton") if version else None
    if spec is None or spec.origin is None:
        raise SettingsError(
            f"a worker on this machine needs {DISTRIBUTION}, which is not installed: "
            "pip install 'headrace[worker-cpu]', or set 'attach' to a Triton that is already running"
        )
    return version, Path(spec.origin).parent


def _copy(server: Path, stub: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        tree = scratch / "tree"
        shutil.copytree(server, tree, ignore=shutil.ignore_patterns("python_backend_stubs"))
        shutil.copy(stub, tree / "backends" / "python" / stub.name)
        for program in (tree / "bin" / "tritonserver", tree / "backends" / "python" / stub.name):
            program.chmod(0o755)
        try:
            tree.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _libpython(python: str) -> tuple[Path, ...]:
    """Directories that hold this interpreter's shared library, which the stub links to.

    Debian's python3 is linked statically and comes without it; headrace.dev.bootstrap puts it into the environment.
    """
    name = f"libpython{python}.so.1.0"
    prefixes = (os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.prefix))  # noqa: PTH118
    for directory in (sysconfig.get_config_var("LIBDIR"), *prefixes):
        if directory and Path(directory, name).is_file():
            return (Path(directory),)
    if ctypes.util.find_library(f"python{python}"):
        return ()  # on the system's own search path
    raise SettingsError(
        f"the worker needs {name}: apt install libpython{python}, or use a Python built with --enable-shared"
    )
