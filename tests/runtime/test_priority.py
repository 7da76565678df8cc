"""A service that goes before all else: its threads do, its helpers and engines do not, and who may not is told why."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runtime import priority
from headrace.runtime.settings import SettingsError
from headrace.triton import launch

ASK = "import os; print(os.sched_getscheduler(0))"


def may() -> bool:
    """Whether this user may schedule so, here."""
    try:
        in_a_thread(lambda: priority.take("router"))
    except SettingsError:
        return False
    return True


def in_a_thread(call: Callable[[], object]) -> object:
    """What a call says in a thread of its own, which takes its policy with it when it ends."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except SettingsError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    if isinstance(found[0], SettingsError):
        raise found[0]
    return found[0]


def policy() -> int:
    return os.sched_getscheduler(0)


@pytest.fixture
def _allowed() -> None:
    if not may():
        pytest.skip("this user may not use SCHED_RR here")


@pytest.mark.usefixtures("_allowed")
def test_who_takes_it_goes_first_with_all_its_threads_but_not_with_its_helpers() -> None:
    def run() -> list[object]:
        priority.take("router")
        with priority.helpers() as helpers:
            return [policy(), in_a_thread(policy), helpers.submit(policy).result(20)]

    assert in_a_thread(run) == [os.SCHED_RR, os.SCHED_RR, os.SCHED_OTHER]
    assert policy() == os.SCHED_OTHER


@pytest.mark.usefixtures("_allowed")
def test_an_engine_is_an_ordinary_process() -> None:
    command = [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), sys.executable, "-c", ASK]

    def run() -> str:
        priority.take("scheduler")
        # The kernel's signal at the parent's death is one at the death of this thread: it waits.
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    assert in_a_thread(run) == f"{os.SCHED_OTHER}\n"


def test_who_was_put_behind_others_stays_there() -> None:
    def run() -> list[object]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with priority.helpers() as helpers:
            asked = helpers.submit(policy).result(20)
        command = [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), sys.executable, "-c", ASK]
        engine = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [asked, int(engine)]

    assert in_a_thread(run) == [os.SCHED_BATCH, os.SCHED_BATCH]


def test_on_one_core_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SettingsError, match=r"^router setting 'realtime': 1 core would be left to nobody else"):
        in_a_thread(lambda: priority.take("router"))


def test_who_may_not_is_told_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(SettingsError, match="Operation not permitted; give the process CAP_SYS_NICE"):
        in_a_thread(lambda: priority.take("scheduler"))
    monkeypatch.delattr(os, "sched_setscheduler")
    with pytest.raises(SettingsError, match="has no SCHED_RR"):
        in_a_thread(lambda: priority.take("scheduler"))
    priority.step_back()
