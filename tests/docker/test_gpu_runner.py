"""docker/run-gpu-tests.sh: without a GPU it passes nothing; with one, what fails is counted. The GPU is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from docker.manifests import DOCKER

TOOLS = ("bash", "dirname", "grep", "head", "base64", "mktemp", "chmod", "rm", "env")


def run(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a checkout and on a PATH of its own; `programs` are shell programs on it."""
    checkout, path = folder / "checkout", folder / "bin"
    (checkout / "docker").mkdir(parents=True)
    path.mkdir()
    shutil.copy(DOCKER / "run-gpu-tests.sh", checkout / "docker")
    (checkout / "Makefile").write_text("test-gpu: setup\n")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (path / tool).symlink_to(found)
    for name, text in programs.items():
        program = path / name.replace("_", "-")
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    return subprocess.run(
        [checkout / "docker" / "run-gpu-tests.sh"], env={**os.environ, "PATH": str(path)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout.splitlines()[-1]


def test_without_a_gpu_it_says_so_and_has_passed_nothing(tmp_path: Path) -> None:
    for number, programs in enumerate(({}, {"nvidia_smi": "exit 9"}, {"nvidia_smi": "true"})):
        (tmp_path / str(number)).mkdir()
        result = run(tmp_path / str(number), **programs, make="exit 1")
        assert result.returncode == 0, result.stderr
        assert "nothing was run on a GPU" in result.stdout
        assert last_line(result) == "0 passed, 0 failed, 1 skipped"


GPU = 'if [ "$1" = --list-gpus ]; then echo "GPU 0: stand-in"; fi'


def test_with_a_gpu_the_profile_and_the_tests_run(tmp_path: Path) -> None:
    docker = f'echo "docker $*" >>{tmp_path}/calls'
    result = run(tmp_path, nvidia_smi=GPU, docker=docker, make=f'echo "make $*" >>{tmp_path}/calls')
    assert result.returncode == 0, result.stdout + result.stderr
    assert last_line(result) == "3 passed, 0 failed"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (
        "docker compose -p headrace-gpu-test -f docker/compose.yaml --profile gpu up --build --detach --wait" in calls
    )
    assert calls.index("make test-gpu") > 0
    assert calls[-1].endswith("down --volumes")


def test_what_fails_on_a_gpu_fails_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, nvidia_smi=GPU, docker="true", make="exit 2")
    assert result.returncode == 1
    assert last_line(result) == "2 passed, 1 failed"


def test_without_a_docker_engine_the_tests_run_alone(tmp_path: Path) -> None:
    result = run(tmp_path, nvidia_smi=GPU, make="true")
    assert result.returncode == 0
    assert "the GPU profile was not run" in result.stdout
    assert last_line(result) == "1 passed, 0 failed"
