"""A tritonserver that is killed takes everything with it: its stub, and what a library has started in the stub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "model_repo" / "llm" / "1" / "model.py"
DEADLINE_S = 20.0
ENGINE = "import time; time.sleep(60)"
STUB = f"""
import importlib.util, os, subprocess, sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
spec = importlib.util.spec_from_file_location("triton_model", {str(MODEL)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}])
print(os.getpid(), engine.pid, flush=True)
module._end_with(os.getppid())
"""
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUB!r}])"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("leads", [True, False], ids=["it leads a process group", "it is one of a group"])
def test_the_stub_and_its_children_go_with_a_server_that_is_killed(leads: bool) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=leads
    )
    assert server.stdout is not None
    stub, engine = map(int, server.stdout.readline().split())
    try:
        assert is_running(stub)
        assert is_running(engine)
        server.kill()
        server.wait(10)
        deadline = time.monotonic() + DEADLINE_S
        while is_running(stub) or (leads and is_running(engine)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert leads or is_running(engine), "in somebody else's group nothing else is touched"
    finally:
        for pid in (stub, engine):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        server.stdout.close()
