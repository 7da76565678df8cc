"""`headrace up` and `demo` as a person uses them: what they say, how they end, what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from support.stack import COMMAND, RunningStack, kill, start, stop

pytestmark = pytest.mark.stack


@pytest.fixture
def synthetic(tmp_path: Path) -> RunningStack:
    return start(tmp_path / "state", "--engine", "synthetic")


def family(running: RunningStack) -> list[psutil.Process]:
    """Everything that the stack runs, Triton and its stubs included."""
    return psutil.Process(running.process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [f"{process.pid} {process.name()}" for process in alive]


def wait_for(running: RunningStack, text: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in running.output():
        assert time.monotonic() < deadline, running.output()
        time.sleep(0.05)


def test_ctrl_c_drains_in_order_and_leaves_nothing(synthetic: RunningStack) -> None:
    processes = family(synthetic)
    assert len(processes) >= 5, "etcd, three services and tritonserver"
    assert stop(synthetic) == 0
    said = synthetic.output()
    order = [said.index(f"stop {part}") for part in ("router", "scheduler", "registry", "etcd")]
    assert order == sorted(order)
    assert not (synthetic.state_dir / "up.json").exists()
    assert_gone(processes)


def test_a_running_stream_is_finished_before_the_stack_stops(synthetic: RunningStack) -> None:
    command = [*COMMAND, "generate", "a prompt", "--model", "synthetic", "--max-tokens", "100", "--json", "--quiet"]
    with subprocess.Popen(command, env=synthetic.environ(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert '"accepted"' in client.stdout.readline()
        assert stop(synthetic) == 0
        events = [json.loads(line) for line in client.stdout]
        assert client.wait(10) == 0
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["sent_tokens"] == 100


def test_a_part_that_dies_is_named_with_its_log_and_ends_the_stack(synthetic: RunningStack) -> None:
    processes = family(synthetic)
    os.kill(synthetic.pid("scheduler"), signal.SIGKILL)
    assert synthetic.process.wait(60) == 1
    last = synthetic.output().splitlines()[-2:]
    assert last[0] == "headrace: the scheduler was ended by SIGKILL"
    assert last[1] == f"  its log: {synthetic.state_dir}/logs/scheduler.log"
    assert_gone(processes)


def test_nothing_survives_the_death_of_up(synthetic: RunningStack) -> None:
    processes = family(synthetic)
    synthetic.process.kill()
    assert_gone(processes)
    kill(synthetic)


def test_a_second_ctrl_c_ends_at_once(synthetic: RunningStack) -> None:
    command = [*COMMAND, "generate", "a prompt", "--model", "synthetic", "--max-tokens", "1000", "--json", "--quiet"]
    with subprocess.Popen(command, env=synthetic.environ(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        processes = family(synthetic)
        synthetic.process.send_signal(signal.SIGINT)
        wait_for(synthetic, "ctrl-C again stops at once")
        started = time.monotonic()
        synthetic.process.send_signal(signal.SIGINT)
        assert synthetic.process.wait(10) == 130
        assert time.monotonic() - started < 5
        client.kill()
    assert_gone(processes)


def test_what_was_registered_is_served_again(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    first = start(state_dir, "--engine", "synthetic")
    before = json.loads(first.run("model", "list").stdout)
    assert stop(first) == 0
    again = start(state_dir, "--engine", "synthetic")
    try:
        assert json.loads(again.run("model", "list").stdout) == before
    finally:
        assert stop(again) == 0


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    command = [*COMMAND, "up", "--port-base", "0", "--state-dir", str(tmp_path / "state"), "--engine", "synthetic"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # "etcd ok": the services start
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert_gone(processes)


def refused(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "up", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_port_in_use_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        base = taken.getsockname()[1]
        result = refused("--port-base", str(base), "--state-dir", str(tmp_path / "s"), "--engine", "synthetic")
    assert result.returncode == 2
    assert f"headrace: port {base}, for the router, cannot be used: Address already in use" in result.stderr
    assert "--port-base" in result.stderr
    assert not (tmp_path / "s").exists()


def test_a_second_stack_in_the_same_directory_is_refused(synthetic: RunningStack) -> None:
    result = refused("--port-base", "0", "--state-dir", str(synthetic.state_dir), "--engine", "synthetic")
    assert synthetic.run("status").returncode == 0
    assert stop(synthetic) == 0
    assert result.returncode == 2
    assert f"headrace: a stack is already up in {synthetic.state_dir}" in result.stderr


def test_a_missing_model_file_is_one_sentence(tmp_path: Path) -> None:
    result = refused("--model", str(tmp_path / "no.gguf"))
    assert result.returncode == 2
    assert result.stderr == f"headrace: cannot read the model file {tmp_path}/no.gguf: No such file or directory\n"


def test_a_file_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_text("hello")
    result = refused("--model", str(tmp_path / "no.gguf"))
    assert result.returncode == 2
    assert "is not a GGUF file: it begins with b'hell'" in result.stderr


def test_a_damaged_default_model_is_one_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "headrace/models/gemma-3-270m-q4_k_m.gguf"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"GGUF and then something else")
    state_dir = tmp_path / "state"
    result = refused("--port-base", "0", "--state-dir", str(state_dir), XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 2
    assert f"headrace: {damaged} has SHA-256" in result.stderr
    assert "was expected" in result.stderr


def test_a_wrong_setting_of_a_service_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text("[scheduler]\n\nthreads = -1\n")
    state_dir = tmp_path / "state"
    result = refused(
        "--port-base", "0", "--state-dir", str(state_dir), "--engine", "synthetic", "--config", str(config)
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"headrace: scheduler setting 'threads' ({config}, line 3): ")
    assert not state_dir.exists()


def test_what_a_service_says_when_it_does_not_start_is_passed_on(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'[scheduler]\nmodel_repository = "{tmp_path}"\netcd_ca_file = "{tmp_path}/no.pem"\n')
    result = refused(
        "--port-base", "0", "--state-dir", str(tmp_path / "s"), "--engine", "synthetic", "--config", str(config)
    )
    assert result.returncode == 1
    assert "headrace: the scheduler ended with code 2: headrace scheduler setting 'etcd_ca_file'" in result.stderr
    assert f"its log: {tmp_path}/s/logs/scheduler.log" in result.stderr


def test_the_demo_streams_an_answer_and_leaves_nothing(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "demo", "--engine", "synthetic", "--max-tokens", "12", "--prompt", "Once upon a time"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once upon a time")
    assert len(result.stdout.split()) > 8
    for fact in ("revision", "replica", "finish reason", "generated tokens", "time to first token"):
        assert fact in result.stderr
    assert not list(tmp_path.glob("headrace-demo-*"))
