"""SGLang (`Engine`) behind the contract. docs/engine-symbols.md names every symbol used and where it was seen.

SGLang gets token ids and gives token ids (`skip_tokenizer_init`); text and stop strings are ours. Where end tokens are
to be ignored it ignores every stop token with them, so the host looks for those itself and aborts.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from headrace.engine.async_engine import (
    ADAPTER,
    GUIDED_BY_XGRAMMAR,
    AsyncEngine,
    choices_as_grammar,
    import_engine,
)
from headrace.engine.backend import Detail
from headrace.engine.config import ConfigError, EngineConfig, Speculative
from headrace.engine.kv_events import ZmqEvents
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.request import Guided, Sampling, invalid
from headrace.engine.signatures import supported

_ENDS = {"stop": End.STOP, "length": End.LENGTH, "abort": End.ABORTED}
_PRIORITIES = 1000
_BAD_REQUEST = 400
_PAGE = 1
_ALGORITHMS = {"draft_model": "STANDALONE", "eagle3": "EAGLE3"}


def make(config: EngineConfig) -> SglangEngine:
    """The adapter, not started."""
    return SglangEngine(config)


class SglangEngine(AsyncEngine):
    """See `AsyncEngine`."""

    kind = "sglang"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._engine: Any = None
        self._kv_events: ZmqEvents | None = None

    async def _open(self) -> None:
        # Before the import. Logprobs are then the model's own, before temperature; SGLang itself sends no usage data,
        # the Hugging Face libraries beneath it would.
        os.environ.update({"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"})
        sglang = import_engine("sglang", self._config, package="sglang")
        engine = importlib.import_module("sglang.srt.entrypoints.engine").Engine
        arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
        self._versions = {"sglang": str(sglang.__version__)}
        if self._is_guided:
            self._guided = GUIDED_BY_XGRAMMAR
        if self._config.kv_events:
            self._kv_events = ZmqEvents(_PAGE, self.kind)
        self._engine = engine(**supported(arguments, self._needed(), self._wanted()))

    @property
    def _is_guided(self) -> bool:
        """Only where it is asked for: it takes SGLang's own tokenizer, which is otherwise left out."""
        return self._config.guided_backend not in ("", "off")

    def _needed(self) -> dict[str, Any]:
        config = self._config
        needed: dict[str, Any] = {
            "model_path": config.model_path,
            "context_length": config.context_tokens,
            "skip_tokenizer_init": not self._is_guided,
            "max_running_requests": config.slots,
            # Each sequence may leave a part of its last page unused.
            "max_total_tokens": config.kv_cells + config.slots,
            "page_size": _PAGE,
            "mem_fraction_static": config.gpu_memory_fraction,
            "tp_size": config.tensor_parallel,
            "dtype": config.dtype,
            "trust_remote_code": False,
            # Without it a request's seed is not looked at.
            "enable_deterministic_inference": True,
        }
        if config.adapter_path:
            needed |= {
                "enable_lora": True,
                "lora_paths": {ADAPTER: config.adapter_path},
                "max_loras_per_batch": 1,
            }
        if self._is_guided:
            needed["grammar_backend"] = config.guided_backend
        if config.speculative is not None:
            needed |= _speculative(config.speculative)
        if self._kv_events is not None:
            needed["kv_events_config"] = json.dumps({"publisher": "zmq", "endpoint": self._kv_events.endpoint})
        return needed

    def _wanted(self) -> dict[str, Any]:
        return {
            "chunked_prefill_size": self._config.prefill_chunk,
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            # As on the others: who runs gives way where KV runs short, the lowest first, and not to whoever comes.
            "retraction_policy": "priority",
            "disable_priority_preemption": True,
            "sampling_defaults": "openai",  # not the model folder's
            "incremental_streaming_output": False,
            "constrained_json_disable_any_whitespace": True,  # a model may write nothing but blanks
            "log_requests": False,
            "enable_metrics": False,
            "disable_cuda_graph": self._config.eager,
        }

    def check(self, sampling: Sampling, top_logprobs: int | None) -> None:
        """Besides what holds for all: a repetition penalty of at most 2."""
        super().check(sampling, top_logprobs)
        if not 0 < sampling.repetition_penalty <= 2:
            raise invalid("sampling.repetition_penalty", "must be above 0 and at most 2 on sglang")

    def _params(self, request: ManagedRequest) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "sampling_seed": (sampling.seed or 0) & 0x7FFFFFFF,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **(_guide(request.guided) if request.guided is not None else {}),
        }
        if self.facts.end_tokens <= request.end_tokens:
            return {**params, "stop_token_ids": sorted(request.end_tokens), "ignore_eos": False}
        return {**params, "ignore_eos": True}

    async def _generate(self, request: ManagedRequest) -> AsyncIterator[Delta]:
        call = self._engine.async_generate
        needed: dict[str, Any] = {
            "input_ids": list(request.prompt),
            "sampling_params": self._params(request),
            "stream": True,
            "rid": request.id,
        }
        if request.cache_salt:
            needed["cache_salt"] = request.cache_salt
        if request.top_logprobs is not None:
            needed |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": request.top_logprobs}
        if self._config.adapter_path:
            needed["lora_path"] = ADAPTER
        wanted = {"priority": round((1 - request.priority) * _PRIORITIES)}
        seen = 0
        drafts = 0
        stream = await call(**supported(call, needed, wanted))
        async for output in stream:
            meta = output["meta_info"]
            tokens = list(output["output_ids"][seen:])  # the whole answer so far, each time
            details = _details(meta, seen, request.top_logprobs) if request.top_logprobs is not None else ()
            seen += len(tokens)
            proposed = int(meta.get("spec_num_proposed_drafts", drafts))
            yield Delta(
                request.id,
                tokens,
                details[: len(tokens)],
                cached=meta.get("cached_tokens", -1),
                proposed=proposed - drafts,
                end=_end(meta.get("finish_reason"), is_guided=request.guided is not None and seen == 0),
            )
            drafts = proposed

    async def _abort(self, request_id: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=request_id)

    async def _look(self) -> ManagedStats:
        """Its processes' health; what is in its KV is not told without stopping for it."""
        manager = self._engine.tokenizer_manager
        watchdog = getattr(manager, "_subprocess_watchdog", None)
        processes = getattr(watchdog, "_processes", None) or ()
        if any(not process.is_alive() for process in processes):
            raise EngineDead("a process of SGLang has ended")
        if self._kv_events is None:
            return ManagedStats()
        self._kv_events.read()
        return ManagedStats(kv_events=self._kv_events.counts)

    async def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        if self._kv_events is not None:
            self._kv_events.close()


def _speculative(one: Speculative) -> dict[str, Any]:
    """A chain of drafts, not a tree, as on the others. SGLang counts the token before them among them."""
    if one.method not in _ALGORITHMS:
        # By the speed of its answers a tenant would learn what others said.
        raise ConfigError("speculative.method must not be ngram on sglang: it looks up in what all requests said.")
    return {
        "speculative_algorithm": _ALGORITHMS[one.method],
        "speculative_draft_model_path": one.draft_path,
        "speculative_num_steps": one.draft_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": one.draft_tokens + 1,
    }


def _guide(guided: Guided) -> dict[str, Any]:
    if guided.kind == "choice":
        return {"ebnf": choices_as_grammar(guided.choices)}
    if guided.kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    return {{"grammar": "ebnf"}.get(guided.kind, guided.kind): guided.text}


def _end(reason: Mapping[str, Any] | str | None, *, is_guided: bool) -> End | None:
    """`is_guided`: a guided one that has said nothing, whose grammar may be what it is refused for."""
    if reason is None:
        return None
    kind = reason if isinstance(reason, str) else reason.get("type")
    if kind == "abort" and isinstance(reason, Mapping) and reason.get("status_code") is not None:
        return End.REFUSED if is_guided and reason["status_code"] == _BAD_REQUEST else End.FAILED
    return _ENDS.get(str(kind), End.FAILED)


def _details(meta: Mapping[str, Any], seen: int, top: int) -> list[Detail]:
    """(logprob, id, text) of each new token, and the likeliest of each position, likeliest first."""
    drawn = meta["output_token_logprobs"][seen:]
    ranked = meta.get("output_top_logprobs") or []
    details = []
    for index, one in enumerate(drawn):
        alternatives = ranked[seen + index] if seen + index < len(ranked) and ranked[seen + index] else []
        details.append(Detail(float(one[0]), [(int(each[1]), float(each[0])) for each in alternatives[:top]]))
    return details
