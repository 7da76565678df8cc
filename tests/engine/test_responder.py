"""Triton's side of a stream: what tritonserver does not survive is never asked of it, whoever asks."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = Path(__file__).resolve().parents[2] / "model_repo" / "llm" / "1" / "model.py"
ONE = [("text", np.zeros(1, np.uint8))]


class Sender:
    """Triton's response sender, as strict as tritonserver would have to be."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_busy = threading.Lock()
        self.may_go = threading.Event()
        self.may_go.set()
        self.has_begun = threading.Event()

    def send(self, response: Any = None, *, flags: int) -> None:
        self._call("FINAL" if flags else "response")

    def is_cancelled(self) -> bool:
        self._call("question")
        return False

    def _call(self, what: str) -> None:
        assert self.is_busy.acquire(blocking=False), "two calls of one request at the same time"
        try:
            assert "FINAL" not in self.calls, f"a {what} after FINAL"
            self.calls.append(what)
            self.has_begun.set()
            assert self.may_go.wait(10)
        finally:
            self.is_busy.release()


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def responder(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`model.py` as Triton loads it, over modules that only Triton has."""
    triton = types.ModuleType("triton_python_backend_utils")
    triton.__dict__.update(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda outputs: outputs,
        TritonModelException=Exception,
    )
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("triton_model", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._TritonResponder(types.SimpleNamespace(get_response_sender=lambda: sender))


def test_nothing_follows_final(responder: Any, sender: Sender) -> None:
    responder.send(ONE, is_final=False)
    assert not responder.is_cancelled()
    responder.send(ONE, is_final=True)
    assert responder.is_cancelled(), "there is nobody to listen"
    for is_final in (False, True):
        with pytest.raises(RuntimeError, match="FINAL"):
            responder.send(ONE, is_final=is_final)
    assert sender.calls == ["response", "question", "FINAL"]


def test_a_final_that_failed_is_not_tried_again(responder: Any, sender: Sender) -> None:
    """Triton may have taken it."""
    sender.may_go = types.SimpleNamespace(wait=lambda _: False)  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        responder.send([], is_final=True)
    with pytest.raises(RuntimeError, match="FINAL"):
        responder.send([], is_final=True)
    assert sender.calls == ["FINAL"]


@pytest.mark.parametrize("second", ["send", "ask"])
def test_one_call_at_a_time(responder: Any, sender: Sender, second: str) -> None:
    """A response that is on its way, and another thread with the end or a question: it waits."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    sender.may_go.clear()
    calls = [
        lambda: responder.send(ONE, is_final=False),
        {"send": lambda: responder.send(ONE, is_final=True), "ask": responder.is_cancelled}[second],
    ]
    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    threads[0].start()
    assert sender.has_begun.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert sender.calls == ["response"]
    sender.may_go.set()
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert sender.calls == ["response", {"send": "FINAL", "ask": "question"}[second]]
