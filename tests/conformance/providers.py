"""Engines that the suite can bring up, and what each says that it can do.

A provider names an engine's configuration, prompts that its model can do something with, and its optional features. An
engine behind the contract joins the suite with one entry in `PROVIDERS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.weights import default_model
from headrace.triton.engine_client import EngineClient
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton
from support import fake_model, tiny_llama

GPU_KINDS = ("tensorrt_llm", "vllm", "sglang")
FEATURES = frozenset(
    {
        "logprobs",  # top_logprobs
        "seed",  # a seed fixes the draw
        "messages",  # a chat template
        "continuation",
        "repeats",  # greedy answers are the same each time, alone or beside others
        "ends",  # `ending` makes the model end by itself
        "cuts",  # `cutting` makes it say characters that are cut over tokens
        "prefix_cache",
        "preempts",  # a sequence without credit gives its room to one that waits
        "kv_budget",  # cells are reserved before admission
        "guided_choice",  # one of some texts
        "guided_json",  # JSON by a schema, regular expressions, grammars
    }
)
CONTEXT = 2048
SLOTS = 8
CELLS = 4096
"""Two full contexts: long requests wait for cells while slots are free."""
WAITING = 256
SETTINGS: Mapping[str, Any] = {
    "revision": "models/conformance/revisions/0123456789ab",
    "incarnation": "conformance",
    "context_tokens": CONTEXT,
    "slots": SLOTS,
    "kv_cells": CELLS,
    "max_waiting": WAITING,
    "prefill_chunk": 64,
}
GREEDY = {"sampling": {"temperature": 0.0}}


@dataclass(frozen=True)
class Provider:
    """How to bring one engine up. `counting` is a greedy request whose answer goes on for as long as it is let.

    `run_ahead`: tokens that it may generate beyond the credit; 0 where a sequence pauses. `slack`: tokens that may come
    of one step of it, beyond any limit that acts between steps.
    """

    name: str
    kind: str
    """Of the hello."""
    settings: Mapping[str, Any]
    counting: Mapping[str, Any]
    ending: Mapping[str, Any] = field(default_factory=dict)
    cutting: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = FEATURES
    run_ahead: int = 0
    slack: int = 1
    many: int = 8
    """Most tokens of each of two hundred answers."""
    start_s: float = 100
    """Longest time until it is loaded."""
    is_faked: bool = False
    is_default: bool = True
    """Whether `make test` runs it."""
    prepare: Callable[[Path], Mapping[str, Any]] = lambda directory: {}
    """More settings, found when it is started: the path of a model file, which it may make in the directory."""
    missing: Callable[[], str] = str
    """Why it cannot run on this machine; "" where it can."""
    packages: tuple[Path, ...] = ()
    """Folders that it can import by their names, beside model.py: Triton's Python does not look at PYTHONPATH."""
    python: Callable[[], Path | None] = lambda: None
    """Directory of the python3 that has its library; None: this environment's."""

    def needs(self, feature: str) -> None:
        """Skip the test where the engine does not declare it."""
        assert feature in FEATURES
        if feature not in self.features:
            pytest.skip(f"{self.name} does not declare {feature}")


@dataclass(frozen=True)
class Running:
    """An engine that is up."""

    provider: Provider
    target: str


_failed: dict[str, str] = {}
"""Engines that did not start: they are not tried again for each test."""


@contextlib.asynccontextmanager
async def running(provider: Provider, directory: Path) -> AsyncIterator[Running]:
    """A tritonserver with the real model repository, brought up, and down again."""
    reason = provider.missing()
    if reason:
        pytest.skip(reason)
    if provider.name in _failed:
        pytest.fail(_failed[provider.name])
    files = prepare_triton(DEFAULT_CACHE_DIR)
    plan = TritonPlan(
        files=dataclasses.replace(files, python=provider.python() or files.python),
        model_repository=_repository(provider, directory),
        engine_config={**SETTINGS, **provider.settings, **provider.prepare(directory)},
        directory=directory / "worker",
        threads=1,
    )
    process = start_triton(plan)
    client = EngineClient(process.target, owner="loading", sink=_Nobody())
    try:
        loading = asyncio.create_task(client.wait_loaded())
        ending = asyncio.create_task(process.wait_exit())
        done, _ = await asyncio.wait({loading, ending}, timeout=provider.start_s, return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        ending.cancel()
        await asyncio.gather(loading, ending, return_exceptions=True)
        if loading not in done:
            _failed[provider.name] = process.failure()
            pytest.fail(_failed[provider.name])
        yield Running(provider, process.target)
    finally:
        await client.close()
        await process.stop(10)


def _repository(provider: Provider, directory: Path) -> Path:
    """The model repository; a copy of it where packages lie beside model.py."""
    repository = find_model_repository(None)
    if not provider.packages:
        return repository
    copy = directory / "model_repo"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for package in provider.packages:
        (copy / "llm" / "1" / package.name).symlink_to(package)
    return copy


class _Nobody:
    def on_batch(self, batch: Any) -> None: ...

    def on_refused(self, seqs: Any, error: Any) -> None: ...


_SYNTHETIC_SETTINGS = {"engine": "synthetic", "prefill_tokens_per_s": 4000, "decode_tokens_per_s": 250}
_SYNTHETIC_PROMPTS: Mapping[str, Any] = {
    "counting": {"prompt": "count the water", "ignore_eos": True, **GREEDY},
    "ending": {"prompt": "say little [[end=7]]", **GREEDY},
    "cutting": {"prompt": "[[say=🌊x💧🚰é水🌊🏞🐟🛶⚙🌊💧🚰⛲🏞🐟]]", **GREEDY},
}
_COUNTING = "1\n2\n3\n4\n5\n6\n"
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
# A letter that no tokenizer has: its four bytes are tokens of their own.
_RARE = "𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠 𐎠"


def _tiny_gguf(directory: Path) -> Mapping[str, Any]:
    path = directory / "tiny.gguf"
    path.write_bytes(tiny_llama.model_gguf())
    return {"model_path": str(path)}


def _gemma(directory: Path) -> Mapping[str, Any]:
    return {"model_path": str(default_model(lambda text: None)), "chat_template": _TEMPLATE}


# It has no language that could be held to anything but one of some texts.
_CHOICE_ONLY = FEATURES - {"guided_json"}
SYNTHETIC = Provider("synthetic", "synthetic", _SYNTHETIC_SETTINGS, features=_CHOICE_ONLY, **_SYNTHETIC_PROMPTS)
# The same engine as one that cannot pause: what the contract says of run-ahead, in a real Triton.
SYNTHETIC_AHEAD = Provider(
    "synthetic-ahead",
    "synthetic",
    {**_SYNTHETIC_SETTINGS, "run_ahead_tokens": 16},
    features=_CHOICE_ONLY,
    run_ahead=16,
    **_SYNTHETIC_PROMPTS,
)
# What the tiny Llama says is known (support/tiny_llama.py). llama.cpp runs it for real, fast enough for `make test`.
TINY_PROMPTS: Mapping[str, Any] = {
    "counting": {"prompt": "go on: xy", "ignore_eos": True, **GREEDY},
    "ending": {"prompt": "ab\n", **GREEDY},
    "cutting": {"prompt": "klm", "ignore_eos": True, **GREEDY},
}
LLAMACPP = Provider("llamacpp", "llamacpp", {"engine": "llamacpp", "threads": 1}, prepare=_tiny_gguf, **TINY_PROMPTS)
LLAMACPP_GEMMA = Provider(
    "llamacpp-gemma",
    "llamacpp",
    {"engine": "llamacpp", "threads": 1},
    counting={"prompt": _COUNTING, "ignore_eos": True, **GREEDY},
    ending={"prompt": "</body>\n</html>", **GREEDY},
    cutting={"prompt": _RARE, "ignore_eos": True, **GREEDY},
    many=3,
    is_default=False,
    prepare=_gemma,
)


_GUIDED_BY = {"tensorrt_llm": "", "vllm": "xgrammar", "sglang": "xgrammar"}
"""SGLang needs its own tokenizer for it, so there it has to be asked for; vLLM then writes JSON without blanks."""


def _faked(kind: str) -> Provider:
    """A GPU engine's adapter over a fake of its library, which has the recorded signatures and no model."""
    tests = Path(__file__).resolve().parents[1]
    return Provider(
        f"{kind}-fake",
        kind,
        {"engine": kind, "run_ahead_tokens": 16, "guided_backend": _GUIDED_BY[kind]},
        features=_CHOICE_ONLY,
        run_ahead=16,
        slack=8,
        is_faked=True,
        prepare=lambda directory: {"model_path": str(fake_model.write_folder(directory / "model"))},
        packages=(tests / "support" / "fake_packages" / kind, tests / "support"),
        counting={"prompt": "count the water", "ignore_eos": True, **GREEDY},
        ending={"prompt": "say little [[end=7]]", **GREEDY},
        cutting={"prompt": "[[say=🌊x💧🚰é水🌊🏞🐟🛶🌊💧🚰⛲🏞🐟]]", **GREEDY},
    )


FAKES = tuple(_faked(kind) for kind in GPU_KINDS)

REAL_PYTHON = "HEADRACE_{}_PYTHON"
"""Variable that names the python3 of an environment with the library; without it, this environment is looked into."""


def _real_python(kind: str) -> Path | None:
    path = os.environ.get(REAL_PYTHON.format(kind.upper()), "")
    return Path(path).parent if path else None


def _missing(kind: str) -> str:
    """Why the real library cannot run here. It is not imported: that takes a GPU's memory, or a minute."""
    if _real_python(kind) is None and importlib.util.find_spec(kind) is None:
        return f"{kind} is not installed here, and {REAL_PYTHON.format(kind.upper())} names no Python that has it"
    if not has_gpu() and kind != "vllm":  # which has a build for CPUs
        return f"{kind} needs a GPU, and there is none here"
    return ""


def has_gpu() -> bool:
    """Whether NVIDIA's driver shows one."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _checkpoint(directory: Path) -> Mapping[str, Any]:
    return {"model_path": str(tiny_llama.checkpoint(directory / "model"))}


def _real(kind: str) -> Provider:
    """A GPU engine itself, with the tiny Llama."""
    return Provider(
        kind,
        kind,
        {
            "engine": kind,
            "run_ahead_tokens": 16,
            "dtype": "float32",
            "gpu_memory_fraction": 0.3,
            "eager": True,
            "guided_backend": _GUIDED_BY[kind],
        },
        run_ahead=16,
        slack=8,
        is_default=False,
        prepare=_checkpoint,
        missing=lambda: _missing(kind),
        python=lambda: _real_python(kind),
        start_s=600,
        **TINY_PROMPTS,
    )


REAL = tuple(_real(kind) for kind in GPU_KINDS)

PROVIDERS: dict[str, Provider] = {
    one.name: one for one in (SYNTHETIC, SYNTHETIC_AHEAD, LLAMACPP, LLAMACPP_GEMMA, *FAKES, *REAL)
}
SELECTION = "HEADRACE_CONFORMANCE"


def selected() -> list[Provider]:
    """Those that the environment names, comma separated; the default ones where it names none."""
    names = [name for name in os.environ.get(SELECTION, "").split(",") if name]
    return [PROVIDERS[name] for name in names] or [one for one in PROVIDERS.values() if one.is_default]
