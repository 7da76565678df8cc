"""Hashing files side by side, and trying chat templates, without a Registry."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import manifests
from headrace.cli.problems import Problem
from headrace.cli.templates import template_problem


def test_hashing_tells_its_progress_and_a_file_that_fails_ends_it(tmp_path: Path) -> None:
    files = {}
    for index in range(12):
        files[f"f{index}"] = tmp_path / f"f{index}"
        files[f"f{index}"].write_bytes(bytes([index]) * (index * 100_000))
    told: list[tuple[int, int]] = []
    states = manifests.hash_files(files, lambda done, size: told.append((done, size)))
    assert list(states) != []
    assert {p: s.sha256 for p, s in states.items()} == {
        p: hashlib.sha256(f.read_bytes()).hexdigest() for p, f in files.items()
    }
    total = sum(f.stat().st_size for f in files.values())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    files["gone"] = tmp_path / "gone"
    with pytest.raises(Problem, match="cannot read"):
        manifests.hash_files(files)


def test_files_are_hashed_side_by_side_and_no_more_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests.os, "cpu_count", lambda: 3)
    together = threading.Barrier(3, timeout=20)  # breaks unless three are hashed at a time
    running, most, lock, hash_one = [0], [0], threading.Lock(), manifests._hash

    def counted(*arguments: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait()
        with lock:
            running[0] -= 1
        return hash_one(*arguments)

    monkeypatch.setattr(manifests, "_hash", counted)
    files = {str(index): tmp_path / str(index) for index in range(9)}
    for file in files.values():
        file.write_bytes(b"x")
    assert len(manifests.hash_files(files)) == 9
    assert most[0] == 3


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", ""),
        ("{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('x') }}{% endif %}", ""),
        ("{% if", "not valid Jinja"),
        ("", "to nothing"),
        ("{{ messages[5].content }}", "cannot render"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "cannot render"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "cannot render"),
        ("{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}", "come to an end"),
    ],
    ids=["plain", "does not raise", "no Jinja", "empty", "index", "escape", "endless text", "endless loop"],
)
def test_templates_are_tried(template: str, says: str) -> None:
    problem = template_problem(template, timeout_s=0.05 if says == "come to an end" else 20)
    assert says in problem if says else problem == ""
