"""Generate the Python code of the protos, beside each .proto file.

The result is committed: the package builds, installs and type-checks without protoc, and
`tests/protos/test_drift.py` fails when it differs from what this program makes.

    python protos/generate.py            write the code here
    python protos/generate.py --to DIR   write it below DIR
    python protos/generate.py --baseline accept the contract of today as the one not to break
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
DOCUMENTED = "headrace/api/documented.binpb"
"""The protos with their comments, for server reflection."""


def generate(into: Path) -> list[Path]:
    """Run protoc over every .proto below `protos/`; returns the files written."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}",
        f"--python_out={into}", f"--pyi_out={into}",
        f"--grpc_python_out={into}", f"--mypy_grpc_out=quiet:{into}",
        f"--descriptor_set_out={into / DOCUMENTED}", "--include_source_info",
        f"--plugin=protoc-gen-mypy_grpc={Path(sysconfig.get_path('scripts')) / 'protoc-gen-mypy_grpc'}",
        *protos,
    ]  # fmt: skip
    (into / DOCUMENTED).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    written = [into / DOCUMENTED, *sorted(into.rglob("*_pb2*.py*"))]
    for path in written:
        if path.name.endswith(("_pb2_grpc.py", "_pb2_grpc.pyi")) and "service" not in path.name:
            path.unlink()  # a file without a service gives an empty module
    return [path for path in written if path.exists()]


def main() -> None:
    """Parse the arguments and do what they ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT, metavar="DIR")
    parser.add_argument("--baseline", action="store_true")
    arguments = parser.parse_args()
    if arguments.baseline:
        buf = shutil.which("buf") or str(Path(sysconfig.get_path("scripts")) / "buf")
        subprocess.run([buf, "build", "-o", "baseline.binpb"], check=True, cwd=ROOT, timeout=120)
        return
    for path in generate(arguments.to):
        print(path.relative_to(arguments.to))


if __name__ == "__main__":
    main()
