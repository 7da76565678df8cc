"""One adapter in two forms: an engine that loads a PEFT folder answers as llama.cpp does with the same numbers in GGUF.

Engines of its own: an adapter is a part of what a worker loads, not of a request.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conformance.providers import GPU_KINDS, GREEDY, PROVIDERS, Provider, running, selected
from conformance.session import connected
from support import tiny_llama

REAL = [one.name for one in selected() if one.name in GPU_KINDS]
if not REAL:
    pytest.skip("no engine that loads a folder is among those of this run", allow_module_level=True)

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

PROMPTS = ["go on: xy", "ab", "klm", "1234"]
TOKENS = 16


def adapted(name: str, adapter: Path) -> Provider:
    """That provider's engine, with the adapter."""
    one = PROVIDERS[name]
    return dataclasses.replace(one, name=f"{name}-lora", settings={**one.settings, "adapter_path": str(adapter)})


async def answers(provider: Provider, directory: Path) -> list[list[int]]:
    directory.mkdir()
    async with running(provider, directory) as up, connected(up) as session:
        return [
            (await session.answer({"prompt": prompt, "ignore_eos": True, **GREEDY}, max_tokens=TOKENS)).ids
            for prompt in PROMPTS
        ]


@pytest.mark.parametrize("name", REAL)
async def test_an_adapter_is_heard_and_means_the_same_as_in_llama_cpp(tmp_path: Path, name: str) -> None:
    gguf = tmp_path / "lora.gguf"
    gguf.write_bytes(tiny_llama.lora_gguf())
    expected = await answers(adapted("llamacpp", gguf), tmp_path / "llamacpp")
    heard = await answers(adapted(name, tiny_llama.lora_folder(tmp_path / "lora")), tmp_path / name)
    assert heard == expected
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        last, plain = tiny_llama.token_of(prompt.encode()[-1]), []
        for _ in range(TOKENS):
            last = tiny_llama.following(last)
            plain.append(last)
        assert ids != plain, f"the adapter is not heard behind {prompt!r}"
