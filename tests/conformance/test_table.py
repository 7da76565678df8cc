"""What the programs say of results: nothing that was faked or not run is called passed."""

from __future__ import annotations

import sys

import pytest

from conformance import gpu, table


def result(case: str, outcome: str, reason: str = "", seconds: float = 1.0) -> dict[str, object]:
    return {"test": f"tests/conformance/test_a.py::test_b[{case}]", "outcome": outcome, "reason": reason, "s": seconds}


def test_each_engine_has_its_own_word() -> None:
    names = ["vllm-fake", "vllm", "synthetic", "sglang"]
    results = [
        result("vllm-fake-1", "passed"),
        result("vllm-1", "passed", seconds=2.0),
        result("vllm-2", "failed", seconds=3.0),
        result("synthetic", "skipped", "synthetic does not declare seed"),
    ]
    found = table.tabulate(results, names)
    report = table.report(found, results, names)
    assert report["tests"] == {
        "a: b": {"vllm-fake": "faked", "vllm": "FAILED", "synthetic": "not declared", "sglang": "not run"}
    }
    assert [report["engines"][name]["seconds"] for name in names] == [1.0, 5.0, 1.0, 0]
    assert table.failures(found) == 1


def test_without_a_gpu_nothing_has_passed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 77
    assert "NOT RUN" in capsys.readouterr().out
