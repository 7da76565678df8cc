"""Guided decoding over the whole path: a model with made-up weights streams JSON, because it may say nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace.client import AsyncClient, HeadraceError, InvalidRequest
from headrace.client.events import Delta
from headrace.control.errors import Reason
from stack.engine_stats import workers
from stack.waiting import until
from support import tiny_llama
from support.stack import SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TINY = "tiny-llama"
SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "minLength": 3, "maxLength": 10},
        "length_km": {"type": "integer", "minimum": 1, "maximum": 6650},
        "mouths": {"type": "array", "items": {"enum": ["sea", "lake", "river"]}, "minItems": 1, "maxItems": 3},
        "navigable": {"type": ["boolean", "null"]},
    },
    "required": ["river", "length_km", "mouths", "navigable"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Llama of 300 KB with random numbers, added to the stack that runs."""
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(tiny_llama.model_gguf())
    added = stack.run("model", "add", str(path), "--name", TINY, "--context", "1024", "--slots", "4", timeout_s=120.0)
    assert added.returncode == 0, added.stderr
    yield TINY
    assert stack.run("model", "remove", TINY, timeout_s=60.0).returncode == 0
    asyncio.run(until(lambda: TINY not in workers(stack)))


async def test_json_is_streamed_and_valid_by_its_schema(stack: RunningStack, tiny: str) -> None:
    async with AsyncClient(stack.router) as client:
        for options in ({"temperature": 0.0}, {"temperature": 1.2, "seed": 11}, {"temperature": 0.8, "top_k": 30}):
            parts: list[str] = []
            stream = client.generate("A river: ", model=tiny, json_schema=SCHEMA, max_tokens=300, **options)  # type: ignore[arg-type]
            async for event in stream:
                if isinstance(event, Delta):
                    parts.append(event.text)
            assert stream.answer is not None
            assert stream.answer.finish_reason.name == "STOP"
            assert len(parts) > 5, "it was streamed"
            assert "".join(parts) == stream.answer.text
            jsonschema.validate(json.loads(stream.answer.text), SCHEMA)


async def test_many_at_once_are_each_held_to_their_own(stack: RunningStack, tiny: str) -> None:
    async with AsyncClient(stack.router) as client:

        async def ask(number: int) -> tuple[int, str]:
            pattern = f"river {number}: [a-z]{{{number % 7 + 1}}}é"
            answer = await client.generate("x", model=tiny, regex=pattern, max_tokens=60, temperature=1.0).read()
            return number, answer.text

        for number, text in await asyncio.gather(*map(ask, range(16))):
            assert re.fullmatch(f"river {number}: [a-z]{{{number % 7 + 1}}}é", text)


@pytest.mark.parametrize(
    ("options", "field", "word"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "guided_decoding.json_schema", "uniqueItems"),
        ({"json_schema": {"$ref": "#"}}, "guided_decoding.json_schema", "allows nothing"),
        ({"regex": "(a"}, "guided_decoding.regex", "invalid regex"),
        ({"regex": r"(a)\1"}, "guided_decoding.regex", "invalid regex"),
    ],
)
async def test_a_guide_that_cannot_be_followed_is_an_invalid_argument_with_its_field(
    stack: RunningStack, tiny: str, options: dict[str, Any], field: str, word: str
) -> None:
    async with AsyncClient(stack.router) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", model=tiny, max_tokens=10, **options).read()
    assert (caught.value.reason, caught.value.code) == (Reason.INVALID_REQUEST, "INVALID_ARGUMENT")
    assert [violation.field for violation in caught.value.violations] == [field]
    assert word in caught.value.violations[0].description


async def test_one_that_can_be_read_in_ever_more_ways_ends_and_spoils_nobody(stack: RunningStack, tiny: str) -> None:
    grammar = "root ::= root root | root root root | [a-z]"
    async with AsyncClient(stack.router) as client:
        other = asyncio.create_task(
            client.generate("ab", model=tiny, max_tokens=100, temperature=0.0, ignore_eos=True).read()
        )
        with pytest.raises(HeadraceError) as caught:
            await client.generate("x", model=tiny, grammar=grammar, max_tokens=500).read()
        assert caught.value.reason is Reason.INVALID_REQUEST
        assert (await other).usage.generated_tokens == 100


async def test_an_engine_without_a_language_says_what_it_can_do(stack: RunningStack) -> None:
    async with AsyncClient(stack.router) as client:
        answer = await client.generate("wet?", model=SYNTHETIC, choice=["yes", "no"], max_tokens=20).read()
        assert answer.text in ("yes", "no")
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("wet?", model=SYNTHETIC, json_schema=SCHEMA, max_tokens=20).read()
    assert caught.value.reason is Reason.GUIDED_DECODING_UNSUPPORTED
    assert caught.value.metadata["supportedKinds"] == "choice"
