"""Build the images of docker/Dockerfile, print their sizes, and write build/reports/images.json.

    python docker/build.py [router scheduler registry worker-cpu worker-gpu etcd-test] [--portable]

Without names: all that can be built without NVIDIA's base. A llama.cpp wheel of this machine's bootstrap is used where
there is one: that takes seconds, and the image then runs on CPUs like this one only (its label headrace.llama-cpp.cpu
says so). --portable builds llama.cpp for any x86-64-v3, which takes minutes: for images that leave the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib

from engine import ROOT, Buildah, find_engine

sys.path.insert(0, str(ROOT / "services"))
from headrace.dev.bootstrap import cpu_identity, llama_version, read_cpuinfo, wheel_folder

TARGETS = ("router", "registry", "scheduler", "worker-cpu", "etcd-test")
WHEELS = ROOT / "build" / "images" / "wheels"
REPORT = ROOT / "build" / "reports" / "images.json"


def place_wheel(portable: bool) -> str:
    """Put this machine's wheel of llama.cpp where the build finds it; returns the CPUs that the image is for."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ready = sorted(wheel_folder(project, dict(os.environ), read_cpuinfo()).glob("llama_cpp_python-*.whl"))
    if portable or not ready:
        return "x86-64-v3"
    shutil.copy(ready[0], WHEELS)
    return f"native-{cpu_identity(read_cpuinfo())}"


def arguments_of(cpu: str) -> dict[str, str]:
    """The build's arguments."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "VERSION": project["project"]["version"],
        "REVISION": git.stdout.strip() or "unknown",
        "LLAMA_CPP_PYTHON": llama_version(project),
        "LLAMA_CPP_CPU": cpu,
    }


def main() -> int:
    """Build; 0 when all were built, 3 when there is nothing here to build with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--portable", action="store_true")
    given = parser.parse_args()
    engine = find_engine()
    if engine is None:
        print("images: no Docker engine answers, and there is no buildah to be run as root: nothing was built")
        return 3
    cpu = place_wheel(given.portable)
    arguments = arguments_of(cpu)
    built = {}
    for target in given.targets:
        began = time.monotonic()
        tag = f"headrace/{target}:{arguments['VERSION']}"
        engine.build(target, tag, arguments)
        size = engine.size_bytes(tag)
        built[target] = {"tag": tag, "bytes": size, "build_s": round(time.monotonic() - began, 1)}
        print(f"images: {target:<11} {size / 1e6:7.1f} MB  {built[target]['build_s']:6.1f} s  {tag}", flush=True)
    if isinstance(engine, Buildah):
        engine.prune()
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(REPORT.read_text())["images"] if REPORT.is_file() else {}
    report = {"engine": engine.name, "llama_cpp_cpu": cpu, "images": {**earlier, **built}}
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
