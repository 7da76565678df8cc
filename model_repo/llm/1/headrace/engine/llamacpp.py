"""llama.cpp, step by step: all sequences of a step share one `llama_decode`.

The high-level `Llama` class serves one sequence at a time, so this drives the C API. The KV cache is unified: every
lane takes its cells from one pool, and a copied prefix costs no cells. The cache of sliding-window layers is kept in
full size (`swa_full`), otherwise a prefix could not be copied once its beginning had slid out of the window.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import llama_cpp.llama_cpp as ll
import numpy as np
import numpy.typing as npt

from headrace.engine.backend import Detail, ModelFacts, Prefill, Sampled
from headrace.engine.config import ConfigError, EngineConfig
from headrace.engine.request import GUIDES, Guided, Sampling
from headrace.engine.sampling import draw, make_chain

try:
    from llguidance import LLMatcher

    from headrace.engine.guide import Guide, compile_guide, make_tokenizer

    HAS_GUIDES = True
except ModuleNotFoundError as error:
    if error.name != "llguidance":
        raise
    HAS_GUIDES = False

_PIECE_BYTES_MAX = 512
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
# More threads than this gain little on a model that fits one machine's CPU, and starve everything beside it.
_THREADS_MAX = 8

_is_continued = False


@ll.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Only errors reach stderr. Level 5 continues the message before it."""
    global _is_continued  # noqa: PLW0603
    is_error = level == _ERROR_LEVEL or (level == 5 and _is_continued)
    _is_continued = is_error
    if is_error:
        sys.stderr.write("llama.cpp: " + text.decode(errors="replace"))


@dataclass(slots=True)
class _Lane:
    chain: Any  # None: plain greedy
    top_logprobs: int | None
    guide: Guide | None = None
    position: int = 0
    token: int = 0


class LlamaBackend:
    """One model and one context. Raises `ConfigError` when the model cannot be loaded."""

    def __init__(self, config: EngineConfig, *, lanes: int) -> None:
        ll.llama_log_set(_log, None)
        ll.llama_backend_init()
        self._slots = config.slots
        self._chunk = config.prefill_chunk
        self._window = config.context_tokens
        self._lanes: dict[int, _Lane] = {}
        threads = config.threads or min(os.cpu_count() or 1, _THREADS_MAX)
        if not Path(config.model_path).is_file():
            raise ConfigError(f"model_path names {config.model_path}, which is not a file.")
        self._model = ll.llama_model_load_from_file(config.model_path.encode(), ll.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"model_path names {config.model_path}, which llama.cpp cannot load.")
        self._vocab = ll.llama_model_get_vocab(self._model)
        size = config.prefill_chunk + config.slots
        params = ll.llama_context_default_params()
        params.n_ctx = config.kv_cells
        params.n_batch = params.n_ubatch = size
        params.n_seq_max = lanes
        params.n_outputs_max = lanes  # at least n_seq_max; a row is as long as the vocabulary: 1 MiB for Gemma 3
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise ConfigError(f"kv_cells {config.kv_cells} and slots {config.slots} make no context in llama.cpp.")
        self._adapter = self._apply_adapter(config) if config.adapter_path else None
        self._memory = ll.llama_get_memory(self._context)
        self._facts = self._read_facts(threads)
        self._guide_lock = Lock()
        self._tokenizer: Any = None
        if not HAS_GUIDES:
            sys.stderr.write("llama.cpp: the Python package llguidance is not installed: no guided decoding\n")
        self._batch = _Batch(size)
        self._pool = ThreadPoolExecutor(threads, "sampler")

    def _apply_adapter(self, config: EngineConfig) -> Any:
        """Every sequence of this engine runs with it: a revision names base and adapter, so both are one model here."""
        path = config.adapter_path
        if not Path(path).is_file():
            raise ConfigError(f"adapter_path names {path}, which is not a file.")
        adapter = ll.llama_adapter_lora_init(self._model, path.encode())
        if not adapter:
            raise ConfigError(f"adapter_path names {path}, which is no LoRA adapter of this model for llama.cpp.")
        if ll.llama_adapter_get_alora_n_invocation_tokens(adapter):
            raise ConfigError(f"adapter_path names {path}, an adapter that a prompt switches on: that is not served.")
        adapters = (ll.llama_adapter_lora_p_ctypes * 1)(adapter)
        scales = (ctypes.c_float * 1)(config.adapter_scale)
        if ll.llama_set_adapters_lora(self._context, adapters, 1, scales):
            raise ConfigError(f"adapter_path names {path}, which llama.cpp cannot set on this model.")
        return adapter

    def _read_facts(self, threads: int) -> ModelFacts:
        vocabulary = ll.llama_vocab_n_tokens(self._vocab)
        ends = frozenset(token for token in range(vocabulary) if ll.llama_vocab_is_eog(self._vocab, token))
        name = ctypes.create_string_buffer(256)
        ll.llama_model_desc(self._model, name, len(name))
        template = ll.llama_model_chat_template(self._model, None)
        return ModelFacts(
            kind="llamacpp",
            model=name.value.decode(errors="replace"),
            vocabulary=vocabulary,
            end_tokens=ends,
            # An answer that is complete has to be ended by a token.
            guided=frozenset(GUIDES) if ends and HAS_GUIDES else frozenset(),
            context_tokens_max=ll.llama_model_n_ctx_train(self._model),
            chat_template=template.decode(errors="replace") if template else None,
            begin_text=self._text(ll.llama_vocab_bos(self._vocab)),
            end_text=self._text(ll.llama_vocab_eos(self._vocab)),
            versions={"llama_cpp_python": _library_version(), "threads": str(threads)},
        )

    @property
    def facts(self) -> ModelFacts:
        """What the model file says."""
        return self._facts

    def _text(self, token: int) -> str:
        text = ll.llama_vocab_get_text(self._vocab, token) if token >= 0 else None
        return text.decode(errors="replace") if text else ""

    def tokenize(self, text: str) -> list[int]:
        """Text as tokens; control tokens may be written out, and a template may have written the first one."""
        data = text.encode()
        add_special = not (self._facts.begin_text and text.startswith(self._facts.begin_text))
        size = len(data) + 8
        while True:
            tokens = (ll.llama_token * size)()
            count = ll.llama_tokenize(self._vocab, data, len(data), tokens, size, add_special, True)
            if count >= 0:
                return tokens[:count]
            if -count <= size:
                raise RuntimeError(f"llama.cpp cannot tokenize: it returned {count}")
            size = -count  # a vocabulary without a blank of its own makes three tokens of each

    def piece(self, token: int) -> bytes:
        """The bytes of a token, none for a control token."""
        buffer = ctypes.create_string_buffer(_PIECE_BYTES_MAX)
        length = ll.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES_MAX, 0, False)
        return buffer.raw[: max(0, length)]

    def compile(self, guided: Guided) -> LLMatcher:
        """See `guide.py`: llama.cpp's own grammars may take time and memory without a bound, and end the process."""
        return compile_guide(guided, self._guide_tokenizer())

    def _guide_tokenizer(self) -> Any:
        """Made by `warm_up`: for a large vocabulary that takes two seconds, in one of which no other thread can run."""
        with self._guide_lock:
            if self._tokenizer is None:
                facts = self._facts
                self._tokenizer = make_tokenizer(facts.vocabulary, self.piece, facts.end_tokens)
            return self._tokenizer

    def warm_up(self) -> None:
        """A full prefill chunk, decoding in one slot, and decoding in all of them beside a chunk; what guides need."""
        if self._facts.guided:
            self._guide_tokenizer()
        token = max(0, ll.llama_vocab_bos(self._vocab))
        for lane in range(self._slots):
            self.begin(lane, [token], [], Sampling(), None)
        self.step([], [Prefill(0, 0, [token] * self._chunk, True)])
        self.step([0], [])
        others = range(1, self._slots)
        self.step([], [Prefill(lane, 0, [token], True) for lane in others])
        self.step(range(self._slots), [])
        for lane in range(self._slots):
            self.end(lane)
        ll.llama_memory_clear(self._memory, False)

    def begin(
        self,
        lane: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
        top_logprobs: int | None,
        guide: LLMatcher | None = None,
    ) -> None:
        """Makes the sampler; plain greedy needs none, a numpy argmax is ten times cheaper."""
        chain = None
        if not sampling.is_plain_greedy:
            chain = make_chain(sampling, prompt, generated, self._facts.vocabulary, self._window)
        followed = None if guide is None else Guide(guide, self._facts.end_tokens, generated)
        self._lanes[lane] = _Lane(chain, top_logprobs, followed)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """In a unified cache both lanes then share the cells."""
        ll.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def truncate(self, lane: int, length: int) -> None:
        """Forgets what lies behind `length`."""
        if not ll.llama_memory_seq_rm(self._memory, lane, length, -1):
            raise RuntimeError("llama.cpp cannot cut this model's KV cache")

    def step(self, decode: Sequence[int], prefill: Sequence[Prefill]) -> Sampled:
        """One `llama_decode`, then one token for each row of logits."""
        batch = self._batch
        batch.clear()
        drawing = []
        for number in decode:
            lane = self._lanes[number]
            drawing.append((lane, batch.add(number, lane.position, [lane.token], wants_logits=True)))
            lane.position += 1
        for chunk in prefill:
            last = batch.add(chunk.lane, chunk.position, chunk.tokens, wants_logits=chunk.is_last)
            if chunk.is_last:
                lane = self._lanes[chunk.lane]
                lane.position = chunk.position + len(chunk.tokens)
                drawing.append((lane, last))
        status = ll.llama_decode(self._context, batch.struct())
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not drawing:
            return Sampled([])
        return self._draw(drawing)

    def _draw(self, drawing: Sequence[tuple[_Lane, int]]) -> Sampled:
        # The rows lie in the order in which the batch asked for them.
        pointer = ll.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, shape=(len(drawing), self._facts.vocabulary))
        if sum(lane.chain is not None for lane, _ in drawing) > 1:
            # A chain walks the whole vocabulary, up to 4 ms for each sequence; the C code runs without the GIL.
            drawn: Iterator[tuple[int, Detail | None]] = self._pool.map(self._draw_one, drawing, logits)
        else:
            drawn = map(self._draw_one, drawing, logits)
        tokens = []
        details = {}
        for row, ((lane, _), (token, detail)) in enumerate(zip(drawing, drawn, strict=True)):
            lane.token = token
            tokens.append(token)
            if detail is not None:
                details[row] = detail
        return Sampled(tokens, details)

    def _draw_one(self, drawing: tuple[_Lane, int], row: npt.NDArray[np.float32]) -> tuple[int, Detail | None]:
        lane, index = drawing
        if lane.guide is not None:
            token = self._draw_guided(lane.guide, lane.chain, row)
        elif lane.chain is None:
            token = int(row.argmax())
        else:
            token = int(ll.llama_sampler_sample(lane.chain, self._context, index))
        if lane.top_logprobs is None or token < 0:
            return token, None
        return token, logprobs_of(row, token, lane.top_logprobs)

    def _draw_guided(self, guide: Guide, chain: Any, row: npt.NDArray[np.float32]) -> int:
        if chain is None:
            return guide.likeliest(row)
        token = guide.drawn(row, lambda allowed: draw(chain, row, allowed))
        if token >= 0:
            ll.llama_sampler_accept(chain, token)
        return token

    def end(self, lane: int) -> None:
        """Gives the sampler back."""
        state = self._lanes.pop(lane, None)
        if state is not None and state.chain is not None:
            ll.llama_sampler_free(state.chain)

    def free(self, lane: int) -> None:
        """Gives the cells back that no other lane shares."""
        ll.llama_memory_seq_rm(self._memory, lane, -1, -1)

    def close(self) -> None:
        """Gives samplers, context and model back."""
        self._pool.shutdown()
        for lane in list(self._lanes):
            self.end(lane)
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)


class _Batch:
    """A `llama_batch` over numpy arrays: filled by slices, without a ctypes call for each token."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._lanes = np.zeros(size, np.int32)
        self._lane_counts = np.ones(size, np.int32)
        self._wants = np.zeros(size, np.int8)
        # Token i belongs to one lane, the i-th of `_lanes`.
        self._lane_pointers = self._lanes.ctypes.data + np.arange(size, dtype=np.uintp) * self._lanes.itemsize
        self._count = 0
        self._struct = ll.llama_batch(
            0,
            _pointer(self._tokens, ctypes.c_int32),
            None,
            _pointer(self._positions, ctypes.c_int32),
            _pointer(self._lane_counts, ctypes.c_int32),
            ctypes.cast(self._lane_pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            _pointer(self._wants, ctypes.c_int8),
        )

    def clear(self) -> None:
        self._count = 0

    def add(self, lane: int, position: int, tokens: Sequence[int], *, wants_logits: bool) -> int:
        """Adds tokens of one lane; returns the index of the last, whose logits may be wanted."""
        begin, end = self._count, self._count + len(tokens)
        self._tokens[begin:end] = tokens
        self._positions[begin:end] = range(position, position + len(tokens))
        self._lanes[begin:end] = lane
        self._wants[begin:end] = 0
        self._wants[end - 1] = wants_logits
        self._count = end
        return end - 1

    def struct(self) -> Any:
        self._struct.n_tokens = self._count
        return self._struct


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def logprobs_of(logits: npt.NDArray[np.float32], token: int, alternatives: int) -> Detail:
    """Natural logarithms of the model's own probabilities: before penalties, temperature and the rest."""
    peak = float(logits.max())
    norm = peak + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if alternatives:
        candidates = np.argpartition(logits, -alternatives)[-alternatives:]
        ranked = candidates[np.lexsort((candidates, -logits[candidates]))]
        top = [(int(candidate), float(logits[candidate]) - norm) for candidate in ranked]
    return Detail(float(logits[token]) - norm, top)


def _library_version() -> str:
    import llama_cpp

    return str(llama_cpp.__version__)
