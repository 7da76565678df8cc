"""What guided decoding costs on llama.cpp with the real model: CPU time of its own for each token, in one thread.

    python tests/bench/guided_cost.py

The engine is turned by hand in this process. CPU time is that of the thread that draws, so it means the same on a busy
machine; the time that llama.cpp takes for the tokens themselves is told beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from engine.harness import GREEDY, Hand, prepared  # noqa: E402

from headrace.cli.weights import default_model  # noqa: E402
from headrace.engine.config import EngineConfig  # noqa: E402
from headrace.engine.guide import Guide  # noqa: E402
from headrace.engine.llamacpp import LlamaBackend  # noqa: E402
from headrace.engine.request import Guided, Sampling  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 6},
        "notes": {"type": "string"},
    },
    "required": ["title", "year", "tags", "notes"],
}
HARD = {
    "any object": Guided("json_object"),
    "a regex of any text": Guided("regex", "(.|\\n)*"),
    "states that double": Guided("regex", ".*a.{300}"),
    "wide classes": Guided("regex", r"(\p{L}\p{N}?){1,3000}"),
    "a grammar of any text": Guided("grammar", 'root ::= "<" root ">" | [^<>] root | ""'),
    "readings that multiply": Guided("grammar", "root ::= root root | root root root | [a-z]"),
}
TOKENS = 48


def spent(call: Callable[[], Any]) -> float:
    """CPU seconds of this thread."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def lasted(call: Callable[[], Any]) -> float:
    """Seconds: a guide is compiled by another thread."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """Print one line a measurement."""
    config = EngineConfig(
        engine="llamacpp",
        model_path=str(default_model(lambda text: None)),
        context_tokens=512,
        slots=4,
        kv_cells=2048,
        threads=1,
    )
    backend = LlamaBackend(config, lanes=8)
    process = psutil.Process()
    before = process.memory_info().rss
    print(f"the vocabulary, while the model is loaded: {lasted(backend._guide_tokenizer):.1f} s", end=", ")
    print(f"{(process.memory_info().rss - before) >> 20} MiB")
    backend.warm_up()
    guided = Guided("json_schema", json.dumps(SCHEMA))
    print(f"a schema, for each request: {1000 * lasted(lambda: backend.compile(guided)):.1f} ms")
    for name, sampling in (("greedy", GREEDY), ("sampled", Sampling(temperature=1.0, top_p=0.95, seed=3))):
        free, _ = measure(backend, None, sampling)
        held, own = measure(backend, backend.compile(guided), sampling)
        own.sort()
        print(
            f"{name}: {1000 * free:.1f} ms a token without a guide, {1000 * held:.1f} with one; the guide's own look"
            f" takes {1000 * sum(own) / len(own):.2f} in the mean, {1000 * own[-1]:.1f} at most"
        )

    for name, guided in HARD.items():
        print(f"{name}: {1000 * longest(backend, guided):.0f} ms for the longest step of 200, or until it is given up")


def longest(backend: LlamaBackend, guided: Guided) -> float:
    """CPU seconds of a step, with a mask for each; the logits are those of an even model."""
    guide = Guide(backend.compile(guided), backend.facts.end_tokens)
    dice = np.random.default_rng(1)
    row = np.zeros(backend.facts.vocabulary, np.float32)
    return max(spent(lambda: guide.drawn(row, dice.choice)) for _ in range(200))


def measure(backend: LlamaBackend, guide: Any, sampling: Sampling) -> tuple[float, list[float]]:
    """CPU seconds a token, and of each look at a guide."""
    own: list[float] = []
    likeliest, allowed = Guide.likeliest, Guide._allowed

    def timed(call: Any) -> Any:
        def measured(*given: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*given)
            finally:
                own.append(time.thread_time() - begun)

        return measured

    if sampling.is_plain_greedy:
        Guide.likeliest = timed(likeliest)  # type: ignore[method-assign]
    else:
        Guide._allowed = timed(allowed)  # type: ignore[method-assign]
    hand = Hand(backend, slots=4, kv_cells=2048)
    hand.submit(prepared(backend, 1, "Describe a film as JSON.\n", guide=guide, max_tokens=TOKENS, sampling=sampling))
    hand.turn()
    seconds = spent(hand.run)
    tokens = hand.loop.stats()["generated_tokens"]
    hand.loop.close()
    for lane in range(8):
        backend.free(lane)
    Guide.likeliest, Guide._allowed = likeliest, allowed  # type: ignore[method-assign]
    return seconds / tokens, own


if __name__ == "__main__":
    main()
