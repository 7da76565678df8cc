"""TensorRT-LLM (`LLM` with the PyTorch backend) behind the contract.

docs/engine-symbols.md names every symbol used and where it was seen. `generate_async` gets token ids and gives token
ids; it never detokenizes, so text and stop strings are ours. Everything is passed by keyword: positions have moved
between releases.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
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
from headrace.engine.kv_events import BufferedEvents
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.peft import rank_of
from headrace.engine.request import Guided
from headrace.engine.signatures import parameters, supported

BLOCK = 32
_ENDS = {"stop": End.STOP, "length": End.LENGTH, "cancelled": End.ABORTED}
_INHERITED = ("OMPI_", "PMIX_", "PMI_")
_EVENTS_MAX = 1024
_DRAFTERS = {
    "ngram": ("NGramDecodingConfig",),
    "draft_model": ("DraftTargetDecodingConfig",),
    "eagle3": ("Eagle3DecodingConfig", "EagleDecodingConfig"),
}


def make(config: EngineConfig) -> TensorRtLlmEngine:
    """The adapter, not started."""
    return TensorRtLlmEngine(config)


class TensorRtLlmEngine(AsyncEngine):
    """See `AsyncEngine`."""

    kind = "tensorrt_llm"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._llm: Any = None
        self._api: Any = None
        self._lora: Any = None
        self._results: dict[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._has_complained = False
        self._kv_events = BufferedEvents(BLOCK) if config.kv_events else None

    async def _open(self) -> None:
        for name in [one for one in os.environ if one.startswith(_INHERITED)]:
            del os.environ[name]  # Triton's own MPI rank would become the engine's
        os.environ.update({"TRTLLM_NO_USAGE_STATS": "1", "TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"})
        package = import_engine("tensorrt_llm", self._config, package="tensorrt_llm (Triton's trtllm image has it)")
        self._api = importlib.import_module("tensorrt_llm.llmapi")
        self._versions = {"tensorrt_llm": str(package.__version__)}
        if self._config.adapter_path:
            request = importlib.import_module("tensorrt_llm.executor.request").LoRARequest
            self._lora = request(lora_name=ADAPTER, lora_int_id=1, lora_path=self._config.adapter_path)
        self._refusals = (ValueError, self._api.RequestError)
        arguments = self._arguments()
        backend = arguments.get("guided_decoding_backend")
        if backend is not None:
            self._guided = GUIDED_BY_XGRAMMAR if backend == "xgrammar" else GUIDED_BY_XGRAMMAR - {"choice"}
        # Blocks for minutes; the constructor starts processes of its own and wants no event loop.
        self._llm = await self._loop.run_in_executor(None, lambda: self._api.LLM(**arguments))

    def _arguments(self) -> dict[str, Any]:
        """What `LLM` gets; it has **kwargs, and its model of arguments says which of them it knows."""
        config = self._config
        needed: dict[str, Any] = {
            "model": config.model_path,
            "backend": "pytorch",
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "tensor_parallel_size": config.tensor_parallel,
            "dtype": config.dtype,
            "max_batch_size": config.slots,
            "max_seq_len": config.context_tokens,
            "max_num_tokens": max(config.prefill_chunk + config.slots, 2 * BLOCK),
            "enable_chunked_prefill": True,
            "kv_cache_config": self._kv_cache(),
            "scheduler_config": self._scheduler(),
        }
        if config.adapter_path:
            lora = _lora_config()
            lora_wanted = {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank_of(config.adapter_path)}
            needed["lora_config"] = lora(**supported(lora, {"lora_dir": [config.adapter_path]}, lora_wanted))
        if config.speculative is not None:
            needed["speculative_config"] = self._speculative(config.speculative)
        wanted: dict[str, Any] = {
            "enable_iter_perf_stats": True,
            "return_perf_metrics": config.speculative is not None,
        }
        if config.guided_backend != "off":
            # It makes its masks from the tokenizer, and asserts that there is one.
            backend = {"guided_decoding_backend": config.guided_backend or "xgrammar"}
            needed["skip_tokenizer_init"] = False
            (needed if config.guided_backend else wanted).update(backend)
        if config.speculative is not None and config.speculative.method == "ngram":
            wanted["disable_overlap_scheduler"] = True  # which it does not work with, says TensorRT-LLM's own example
        if config.eager:
            wanted |= {"cuda_graph_config": None, "torch_compile_config": None}
        known = getattr(getattr(self._api, "TorchLlmArgs", None), "model_fields", None)
        if known is None:
            return needed | wanted
        missing = sorted(set(needed) - set(known) - {"backend"})
        if missing:
            raise ConfigError(
                f"This release's LLM does not take {', '.join(missing)}; docs/engines.md names tested ones."
            )
        return needed | {name: value for name, value in wanted.items() if name in known}

    def _kv_cache(self) -> Any:
        config, call = self._config, self._api.KvCacheConfig
        needed = {
            "enable_block_reuse": True,
            # Each sequence may leave a part of its last block unused.
            "max_tokens": config.kv_cells + config.slots * BLOCK,
            "free_gpu_memory_fraction": config.gpu_memory_fraction,
        }
        wanted: dict[str, Any] = {"tokens_per_block": BLOCK}
        if config.kv_events:
            needed["event_buffer_max_size"] = _EVENTS_MAX
        return call(**supported(call, needed, wanted))

    def _scheduler(self) -> Any:
        """Who has reserved everything is never evicted; with over-committed cells the engine pauses as it must."""
        policies = self._api.CapacitySchedulerPolicy
        over = self._config.kv_over_commit > 1
        call = self._api.SchedulerConfig
        policy = policies.MAX_UTILIZATION if over else policies.GUARANTEED_NO_EVICT
        return call(**supported(call, {"capacity_scheduler_policy": policy}, {}))

    def _speculative(self, one: Speculative) -> Any:
        """The configuration of a drafter; both its class and the field of its files have had two names."""
        for name in _DRAFTERS[one.method]:
            call = getattr(self._api, name, None)
            if call is not None:
                break
        else:
            raise ConfigError(f"This release of TensorRT-LLM has no {' or '.join(_DRAFTERS[one.method])}.")
        if one.method == "ngram":
            return call(**supported(call, _ngram(one), {}))
        known = parameters(call) or frozenset({"speculative_model"})
        where = "speculative_model" if "speculative_model" in known else "speculative_model_dir"
        return call(**supported(call, {"max_draft_len": one.draft_tokens, where: one.draft_path}, {}))

    def _params(self, request: ManagedRequest) -> Any:
        sampling = request.sampling
        ends = sorted(request.end_tokens)
        needed: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "end_id": ends[0] if ends else -1,
            "pad_id": ends[0] if ends else 0,
            "stop_token_ids": ends[1:] or None,
            "detokenize": False,
            "add_special_tokens": False,
            "n": 1,
        }
        if sampling.temperature == 0:
            needed["top_k"] = 1
        else:
            needed |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            needed |= {"seed": sampling.seed}
            if sampling.min_p:
                needed["min_p"] = sampling.min_p
        for name, neutral in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
            if getattr(sampling, name) != neutral:
                needed[name] = getattr(sampling, name)
        if request.top_logprobs is not None:
            needed["logprobs"] = max(1, request.top_logprobs)
        if request.guided is not None:
            guide = self._api.GuidedDecodingParams
            needed["guided_decoding"] = guide(**supported(guide, _guide(request.guided), {}))
        call = self._api.SamplingParams
        return call(**supported(call, needed, {}))

    async def _generate(self, request: ManagedRequest) -> AsyncIterator[Delta]:
        call = self._llm.generate_async
        needed: dict[str, Any] = {
            "inputs": list(request.prompt),
            "sampling_params": self._params(request),
            "streaming": True,
        }
        if request.cache_salt:
            needed["cache_salt"] = request.cache_salt
        if self._lora is not None:
            needed["lora_request"] = self._lora
        result = call(**supported(call, needed, {"priority": request.priority}))
        self._results[request.id] = result
        seen = drafts = 0
        try:
            async for output in result:  # the same object every time: what is new is copied out now
                one = output.outputs[0]
                tokens = list(one.token_ids[seen:])
                details = _details(one.logprobs, seen, tokens, request.top_logprobs)
                seen += len(tokens)
                proposed = _proposed(one)
                yield Delta(
                    request.id,
                    tokens,
                    details,
                    cached=getattr(output, "cached_tokens", -1),
                    proposed=max(0, proposed - drafts),
                    end=_ENDS.get(one.finish_reason, End.FAILED) if output.finished else None,
                    end_token=_trimmed(request, one, tokens) if output.finished else None,
                )
                drafts = max(drafts, proposed)
        finally:
            self._results.pop(request.id, None)

    async def _abort(self, request_id: str) -> None:
        result = self._results.get(request_id)
        if result is not None:
            result.abort()

    async def _look(self) -> ManagedStats:
        if self._is_shut():
            raise EngineDead("the executor is shut down")
        with contextlib.suppress(Exception):  # beta, and empty before the first request: what was said last stands
            async for document in self._llm.get_stats_async(timeout=0.05):
                self._last = document
        if self._kv_events is not None:
            await self._read_kv_events(self._kv_events)
        counts = self._kv_events.counts if self._kv_events is not None else None
        return replace(_stats(self._last), kv_events=counts)

    async def _read_kv_events(self, events: BufferedEvents) -> None:
        """As many as are there, and no more than fill the buffer; the rest waits for the next look."""
        found: list[Any] = []
        try:
            async for event in self._llm.get_kv_cache_events_async(timeout=0.05):
                found.append(event)
                if len(found) >= _EVENTS_MAX:
                    break
        except Exception as error:  # beta: what came counts
            if not found and not self._has_complained:
                self._has_complained = True
                sys.stderr.write(f"headrace engine: KV events cannot be read: {type(error).__name__}\n")
        events.take(found)

    def _is_shut(self) -> bool:
        executor = getattr(self._llm, "_executor", None)
        return executor is None or bool(executor.is_shutdown())

    def _is_death(self, error: BaseException) -> bool:
        """RequestError is of one request; after anything else the executor shuts itself down."""
        if isinstance(error, EngineDead):
            return True
        return not isinstance(error, (self._api.RequestError, ValueError, TypeError)) and self._is_shut()

    async def _close(self) -> None:
        if self._llm is not None:
            await self._loop.run_in_executor(None, self._llm.shutdown)


def _guide(guided: Guided) -> dict[str, Any]:
    if guided.kind == "choice":
        return {"grammar": choices_as_grammar(guided.choices)}
    if guided.kind == "json_object":
        return {"json_object": True}
    return {{"json_schema": "json"}.get(guided.kind, guided.kind): guided.text}


def _lora_config() -> Any:
    """`LoraConfig` has moved after 1.2; the new place is tried first, since the old one then only forwards to it."""
    for name in ("tensorrt_llm._torch.peft.lora.config", "tensorrt_llm.lora_helper"):
        try:
            return importlib.import_module(name).LoraConfig
        except (ImportError, AttributeError):
            continue
    raise ConfigError("This release of TensorRT-LLM has LoraConfig in a place that is not known here.")


def _ngram(one: Speculative) -> dict[str, Any]:
    """Each request looks up in its own tokens: one pool for all would tell a tenant by speed what others said."""
    return {"max_draft_len": one.draft_tokens, "max_matching_ngram_size": one.ngram_max, "is_public_pool": False}


def _trimmed(request: ManagedRequest, one: Any, tokens: Sequence[int]) -> int | None:
    """The stop token that was cut off: `end_id` stays among the ids, stop words do not."""
    if one.finish_reason != "stop" or (tokens and tokens[-1] in request.end_tokens):
        return None
    reason = one.stop_reason
    return reason if isinstance(reason, int) and not isinstance(reason, bool) else min(request.end_tokens, default=None)


def _details(logprobs: Any, seen: int, tokens: Sequence[int], top: int | None) -> list[Detail]:
    """The logprob of each new token and the likeliest `top`: a list of {id: Logprob}."""
    if top is None:
        return []
    positions = (logprobs or [])[seen : seen + len(tokens)]
    if len(positions) != len(tokens):
        raise ConfigError("TensorRT-LLM told no logprobs though it was asked for them.")
    details = []
    for token, position in zip(tokens, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        drawn = position.get(token)
        value = drawn.logprob if drawn is not None else ranked[0][1].logprob
        details.append(Detail(float(value), [(index, float(each.logprob)) for index, each in ranked[:top]]))
    return details


def _proposed(one: Any) -> int:
    """Draft tokens of the stay so far, where the metrics of speculative decoding are on."""
    metrics = getattr(one, "request_perf_metrics", None)
    spoken = getattr(metrics, "speculative_decoding", None)
    return int(getattr(spoken, "total_draft_tokens", 0) or 0)


def _stats(document: Mapping[str, Any]) -> ManagedStats:
    kv = document.get("kvCacheStats") or {}
    block = kv.get("tokensPerBlock", BLOCK)
    return ManagedStats(
        running=document.get("numActiveRequests", -1),
        queued=document.get("numQueuedRequests", -1),
        kv_tokens=kv["maxNumBlocks"] * block if "maxNumBlocks" in kv else -1,
        kv_used_tokens=kv["usedNumBlocks"] * block if "usedNumBlocks" in kv else -1,
    )
