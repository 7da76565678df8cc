"""llama.cpp alone: the batch loop that everything else is measured against.

One `llama_decode` a step for all sequences and the library's own greedy sampler for each: no server, no Triton, no
Python between the steps but the loop itself. Prints one JSON line a concurrency: tokens, seconds, and the token ids.

    python tests/bench/bare_llamacpp.py MODEL.gguf --tokens 64 --concurrency 1 8 16
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

import llama_cpp.llama_cpp as ll

PROMPTS = [
    "The history of the bridge begins in",
    "A recipe for bread needs",
    "The three laws of motion say that",
    "In the north of the country, winters are",
    "The committee met on Tuesday to discuss",
    "A good teacher knows that",
    "The river rises in the mountains and",
    "When the ship left the harbour,",
    "The value of a good night's sleep is",
    "Most programming languages have",
    "The library opened its doors in",
    "An orchestra is usually divided into",
    "The old man looked at the sea and",
    "To plant a tree, first",
    "The market sells fruit, vegetables and",
    "Light travels faster than sound, so",
]


def quiet() -> Any:
    """Silence the library's log; the callback must stay referenced."""
    callback = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


class Bare:
    """The model and the loop."""

    def __init__(self, path: str, *, sequences: int, context: int, threads: int, adapter: str = "") -> None:
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        self.vocabulary = ll.llama_model_get_vocab(self.model)
        parameters = ll.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = context, 512, sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = True
        self.context = ll.llama_init_from_model(self.model, parameters)
        if adapter:
            self.adapter = ll.llama_adapter_lora_init(self.model, adapter.encode())
            one, scale = (ll.llama_adapter_lora_p_ctypes * 1)(self.adapter), (ctypes.c_float * 1)(1.0)
            if ll.llama_set_adapters_lora(self.context, one, 1, scale):
                raise SystemExit(f"llama.cpp does not take {adapter}")
        self.batch = ll.llama_batch_init(512, 0, sequences)
        self.sampler = ll.llama_sampler_init_greedy()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, with the model's own begin token."""
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = ll.llama_tokenize(self.vocabulary, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def generate(self, prompts: list[str], tokens: int) -> tuple[list[list[int]], float, float]:
        """Greedy; returns the ids of each, seconds in all, and seconds of the decoding after the prompts."""
        memory = ll.llama_get_memory(self.context)
        ll.llama_memory_clear(memory, True)
        started = time.perf_counter()
        output: list[list[int]] = []
        positions = []
        for sequence, prompt in enumerate(prompts):
            ids = self.tokenize(prompt)
            self._fill([(token, position, sequence, position == len(ids) - 1) for position, token in enumerate(ids)])
            self._decode()
            output.append([ll.llama_sampler_sample(self.sampler, self.context, len(ids) - 1)])
            positions.append(len(ids))
        decoding = time.perf_counter()
        for _ in range(tokens - 1):
            self._fill([(ids[-1], positions[s], s, True) for s, ids in enumerate(output)])
            self._decode()
            for sequence, ids in enumerate(output):
                ids.append(ll.llama_sampler_sample(self.sampler, self.context, sequence))
                positions[sequence] += 1
        ended = time.perf_counter()
        return output, ended - started, ended - decoding

    def _fill(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants

    def _decode(self) -> None:
        code = ll.llama_decode(self.context, self.batch)
        if code:
            raise SystemExit(f"llama_decode failed with {code}")


def main() -> None:
    """Measure each concurrency `--repeat` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=json.loads, help="JSON list; each is run alone, instead of the built-in ones")
    parser.add_argument("--adapter", default="", help="LoRA adapter, GGUF")
    arguments = parser.parse_args()
    keep = quiet()
    bare = Bare(
        arguments.model,
        sequences=max(arguments.concurrency),
        context=8192,
        threads=arguments.threads,
        adapter=arguments.adapter,
    )
    bare.generate(PROMPTS[:1], 4)
    batches = [[p] for p in arguments.prompts] if arguments.prompts else [PROMPTS[:n] for n in arguments.concurrency]
    for _ in range(arguments.repeat):
        for prompts in batches:
            ids, seconds, _decoding = bare.generate(prompts, arguments.tokens)
            count = len(prompts)
            tokens = count * arguments.tokens
            line = json.dumps({"concurrency": count, "tokens": tokens, "seconds": seconds, "ids": ids})
            print(line, flush=True)
    assert keep is not None


if __name__ == "__main__":
    main()
