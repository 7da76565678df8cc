"""`status`, `generate` and `model` against the real stack: output, tables, JSON, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.cli.registration import Admin
from headrace.cli.weights import default_model
from support.stack import COMMAND, MODEL, SYNTHETIC, RunningStack

pytestmark = pytest.mark.stack


def test_status_tells_services_replicas_and_snapshots(stack: RunningStack) -> None:
    result = stack.run("status")
    assert result.returncode == 0, result.stdout
    document = json.loads(result.stdout)
    assert document["healthy"]
    assert {s["name"].split("/")[0] for s in document["services"]} == {"routers", "schedulers", "registries"}
    assert {s["snapshot"] for s in document["services"]} == {document["snapshot"]["version"]}
    assert {r["state"] for r in document["replicas"]} == {"ready"}
    assert {r["worker"] for r in document["replicas"]} == {"ready"}
    assert {r["health"] for r in document["replicas"]} == {"started, alive, ready"}
    assert all(r["detail"].startswith("warmed up: chunk of ") for r in document["replicas"])
    assert {a["name"] for a in document["aliases"]} >= {f"aliases/{MODEL}", f"aliases/{SYNTHETIC}"}


def test_status_without_a_stack_is_one_sentence() -> None:
    environ = {"HEADRACE_REGISTRY": "127.0.0.1:9", "PATH": ""}
    result = subprocess.run([*COMMAND, "status"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("headrace: the registry at 127.0.0.1:9 does not answer\n")


def test_generate_pipes_the_text_alone_and_tells_the_cost_aside(stack: RunningStack) -> None:
    result = stack.run("generate", "1, 2, 3, 4, 5, 6, 7,", "--max-tokens", "8", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    again = stack.run("generate", "1, 2, 3, 4, 5, 6, 7,", "--max-tokens", "8", "--temperature", "0", "--quiet")
    assert again.stdout == result.stdout
    assert again.stderr == ""
    for fact in ("revision", "replica", "finish reason", "prompt tokens", "generated tokens", "sent tokens",
                 "time to first token", "time per output token"):  # fmt: skip
        assert fact in result.stderr


def test_generate_json_is_one_event_a_line(stack: RunningStack) -> None:
    result = stack.run("generate", "a b", "--model", SYNTHETIC, "--max-tokens", "5", "--json", "--quiet")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["event"] == "accepted"
    assert events[-1]["event"] == "terminal"
    assert events[-1]["usage"]["sent_tokens"] == 5


def test_generate_streams_while_it_is_generated(stack: RunningStack) -> None:
    command = [*COMMAND, "generate", "a b", "--model", SYNTHETIC, "--max-tokens", "100", "--json", "--quiet"]
    with subprocess.Popen(command, env=stack.environ(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert process.poll() is None, "100 tokens take two seconds"
        assert '"delta"' in lines[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert '"length"' not in process.stdout.read()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["x", "--model", "nobody"], 2, "MODEL_NOT_FOUND"),
        (["", "--model", MODEL], 2, "prompt: must not be empty"),
        (["x", "--top-p", "7"], 2, "sampling.top_p"),
        (["x", "--max-tokens", "-1"], 2, "max_tokens"),
        (["x", "--model", SYNTHETIC, "--timeout", "0.3", "--max-tokens", "500"], 1, "deadline"),
        (["x", "--timeout", "0"], 1, "timeout_s is 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_request_that_cannot_work_is_one_sentence(
    stack: RunningStack, arguments: list[str], code: int, says: str
) -> None:
    result = stack.run("generate", *arguments, "--quiet")
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("headrace: ")
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr


def test_a_model_is_added_used_listed_and_removed(stack: RunningStack, tmp_path: Path) -> None:
    file = tmp_path / "Second Copy.gguf"
    file.symlink_to(default_model(lambda _terms: None))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    added = stack.run(
        "model", "add", str(file), "--context", "512", "--slots", "2", "--name", "second", "--chat-template",
        str(template), timeout_s=110,
    )  # fmt: skip
    assert added.returncode == 0, added.stderr
    revision = added.stdout.strip()
    assert revision.startswith("models/second/revisions/")
    rows = {row["name"]: row for row in json.loads(stack.run("model", "list").stdout)}
    assert rows["second"]["state"] == "ready"
    assert rows["second"]["targets"][0]["revision"] == revision
    answer = stack.run("generate", "--chat", "One, two, three,", "--model", "second", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr
    assert revision in answer.stderr
    removed = stack.run("model", "remove", "second")
    assert removed.returncode == 0, removed.stderr
    assert stack.run("model", "remove", "second").returncode == 2
    assert stack.run("generate", "x", "--model", "second").returncode == 2


def test_an_artifact_becomes_a_revision_that_serves(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(default_model(lambda _terms: None))
    (tmp_path / "README.md").write_text("made by a test")
    created = stack.run("artifact", "create", str(tmp_path), "--label", "made-by=test", timeout_s=60)
    assert created.returncode == 0, created.stderr
    artifact = created.stdout.strip()
    facts = json.loads(stack.run("artifact", "show", artifact).stdout)["facts"]
    assert (facts["architecture"], facts["weight_type"], facts["layers"]) == ("gemma3", "q4_k_m", 18)
    refused = stack.run("revision", "create", "third", "--artifact", artifact, "--context", "40000")
    assert refused.returncode == 2
    assert "at most 32768" in refused.stderr
    options = ["--artifact", artifact, "--context", "512", "--slots", "2", "--kv-cells", "1024", "--alias", "third"]
    made = stack.run("revision", "create", "third", *options)
    assert made.returncode == 0, made.stderr
    with Admin(stack.registry) as admin:
        admin.wait_ready(made.stdout.strip(), 100, lambda _text: None)
    answer = stack.run("generate", "One, two, three,", "--model", "third", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr
    assert made.stdout.strip() in answer.stderr
    assert stack.run("artifact", "verify", artifact, timeout_s=60).returncode == 0
    assert stack.run("model", "remove", "third").returncode == 0


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (None, [], "No such file"),
        (b"hello", [], "is not a GGUF file"),
        (b"GGUF....", ["--sha256", "00"], "and 00 was expected"),
        (b"GGUF....", ["--name", "No Name"], "cannot be a model's name"),
    ],
    ids=["missing", "not a model", "wrong digest", "bad name"],
)
def test_a_file_that_cannot_be_added_is_one_sentence(
    stack: RunningStack, tmp_path: Path, content: bytes | None, options: list[str], says: str
) -> None:
    file = tmp_path / "m.gguf"
    if content is not None:
        file.write_bytes(content)
    result = stack.run("model", "add", str(file), *options)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
