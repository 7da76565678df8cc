"""TensorRT-LLM (`LLM` with the PyTorch backend) behind the contract.

docs/engine-symbols.md names every symbol used and where it was seen. `generate_async` gets token ids and gives token
ids; it never detokenizes, so text and stop strings are ours. Everything is passed by keyword: positions have moved
between releases.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from headrace.engine.async_engine import ADAPTER, AsyncEngine, import_engine
from headrace.engine.backend import Detail
from headrace.engine.config import ConfigError, EngineConfig
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.peft import rank_of
from headrace.engine.signatures import supported

BLOCK = 32
_ENDS = {"stop": End.STOP, "length": End.LENGTH, "cancelled": End.ABORTED}
_INHERITED = ("OMPI_", "PMIX_", "PMI_")
_EVENTS_MAX = 1024


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
        arguments = self._arguments()
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
            lora = importlib.import_module("tensorrt_llm.lora_helper").LoraConfig
            lora_wanted = {
                "lora_dir": [config.adapter_path],
                "max_loras": 1,
                "max_cpu_loras": 1,
                "max_lora_rank": rank_of(config.adapter_path),
            }
            needed["lora_config"] = lora(**supported(lora, {}, lora_wanted))
        if config.speculative is not None:
            needed["speculative_config"] = dict(config.speculative)
        wanted: dict[str, Any] = {
            "enable_iter_perf_stats": True,
            "return_perf_metrics": config.speculative is not None,
        }
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
        wanted = {"event_buffer_max_size": _EVENTS_MAX if config.kv_events else 0}
        return call(**supported(call, needed, wanted))

    def _scheduler(self) -> Any:
        """Who has reserved everything is never evicted; with over-committed cells the engine pauses as it must."""
        policies = self._api.CapacitySchedulerPolicy
        over = self._config.kv_over_commit > 1
        call = self._api.SchedulerConfig
        policy = policies.MAX_UTILIZATION if over else policies.GUARANTEED_NO_EVICT
        return call(**supported(call, {"capacity_scheduler_policy": policy}, {}))

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
        try:
            async for document in self._llm.get_stats_async(timeout=0.05):
                self._last = document
        except EngineDead:
            raise
        except Exception:  # beta, and empty before the first request: what was said last stands
            return _stats(self._last)
        return _stats(self._last)

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
