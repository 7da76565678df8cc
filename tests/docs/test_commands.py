"""Every command and program in README.md and docs/ is run, against the real stack, with a real grpcurl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.documents import Block, blocks
from support.stack import COMMAND, RunningStack

pytestmark = pytest.mark.stack
TIMEOUT_S = 60


@pytest.fixture
def environ(stack: RunningStack, tmp_path: Path) -> dict[str, str]:
    """A reader's shell: `headrace`, `grpcurl` and `python` on the PATH, and a stack that is up."""
    headrace = tmp_path / "headrace"
    headrace.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    headrace.chmod(0o755)
    path = [str(tmp_path), sysconfig.get_path("scripts"), os.environ["PATH"]]
    return {**stack.environ(), "PATH": ":".join(path)}


@pytest.mark.parametrize("block", [b for b in blocks() if b.kind in {"run", "python"}], ids=str)
def test_it_does_what_the_page_says(block: Block, stack: RunningStack, environ: dict[str, str]) -> None:
    # A reader's stack is on the default port, this one is on another.
    text = block.text.replace("127.0.0.1:50051", stack.router)
    command = [sys.executable, "-c", text] if block.kind == "python" else ["bash", "-euo", "pipefail", "-c", text]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    output = result.stdout + result.stderr
    assert (result.returncode != 0) == block.fails, output
    assert not block.expected or re.search(block.expected, output), output


def test_describe_shows_what_a_field_means(stack: RunningStack, environ: dict[str, str]) -> None:
    result = subprocess.run(
        ["grpcurl", "-plaintext", stack.router, "describe", "headrace.api.inference.v1.SamplingParameters"],
        env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "0 always takes the likeliest token (greedy)" in result.stdout


@pytest.mark.parametrize("service", ["", "headrace.api.inference.v1.InferenceService"])
def test_health_answers_for_each_service(service: str, stack: RunningStack, environ: dict[str, str]) -> None:
    result = subprocess.run(
        ["grpcurl", "-plaintext", "-d", f'{{"service": "{service}"}}', stack.router, "grpc.health.v1.Health/Check"],
        env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert '"SERVING"' in result.stdout, result.stderr
