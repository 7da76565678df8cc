"""A FAKE of TensorRT-LLM, no part of it: the signatures of tests/engine/recorded/tensorrt_llm.json around `fake_model`.

It refuses every argument that the recorded release refuses. It batches nothing and needs no GPU, so passing against it
says that the adapter speaks TensorRT-LLM's language, and nothing of TensorRT-LLM itself.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from support import fake_model
from support.fake_core import FakeCore, guide
from support.fake_vllm import install_modules
from support.recorded import Recorded, as_recorded, record, signature

engines: list[LLM] = []
_ids = itertools.count(1)


class CapacitySchedulerPolicy(enum.Enum):
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"
    STATIC_BATCH = "STATIC_BATCH"


class RequestError(RuntimeError):
    pass


class SamplingParams(Recorded):
    RECORD = ("tensorrt_llm", "SamplingParams")


class GuidedDecodingParams(Recorded):
    RECORD = ("tensorrt_llm", "GuidedDecodingParams")


class KvCacheConfig(Recorded):
    RECORD = ("tensorrt_llm", "KvCacheConfig")


class SchedulerConfig(Recorded):
    RECORD = ("tensorrt_llm", "SchedulerConfig")


class LoraConfig(Recorded):
    RECORD = ("tensorrt_llm", "LoraConfig")


class MovedLoraConfig(Recorded):
    """Where later releases have it."""

    RECORD = ("tensorrt_llm", "LoraConfig (moved)")


class NGramDecodingConfig(Recorded):
    RECORD = ("tensorrt_llm", "NGramDecodingConfig")


class DraftTargetDecodingConfig(Recorded):
    RECORD = ("tensorrt_llm", "DraftTargetDecodingConfig")


class Eagle3DecodingConfig(Recorded):
    RECORD = ("tensorrt_llm", "Eagle3DecodingConfig")


class EagleDecodingConfig(Recorded):
    """An older release's."""

    RECORD = ("tensorrt_llm", "EagleDecodingConfig")


class LoRARequest(Recorded):
    RECORD = ("tensorrt_llm", "LoRARequest")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not Path(self.lora_path).exists():
            raise ValueError("lora_path does not exist.")


class TorchLlmArgs:
    model_fields: ClassVar = dict.fromkeys(signature("tensorrt_llm", "TorchLlmArgs").parameters)


class Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob, self.rank = logprob, None


class CompletionOutput(Recorded):
    RECORD = ("tensorrt_llm", "CompletionOutput")


class RequestOutput:
    """The same object at every step, as there."""

    def __init__(self, llm: LLM, given: dict[str, Any]) -> None:
        asyncio.get_running_loop()  # without one there is no queue to iterate
        self.request_id = next(_ids)
        self.finished = False
        self.outputs = [CompletionOutput(index=0)]
        self.outputs[0].__dict__.update(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None)
        self._llm, self._given = llm, given
        guided = given["sampling_params"].guided_decoding
        assert guided is None or (llm.args["guided_decoding_backend"] and not llm.args["skip_tokenizer_init"])
        self._choices = guide(guided.given, "grammar") if guided is not None else ()
        self.cached_tokens = llm.core.cached(given["inputs"], given.get("cache_salt") or "")

    def abort(self) -> None:
        if str(self.request_id) in self._llm.core.running:
            self._llm.core.aborted.add(str(self.request_id))

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[RequestOutput]:
        params: SamplingParams = self._given["sampling_params"]
        one = self.outputs[0]
        words = frozenset(params.stop_token_ids or ())
        greedy = params.top_k == 1 or not (params.temperature or params.top_p or params.top_k)
        answer = self._llm.core.generate(
            str(self.request_id),
            self._given["inputs"],
            max_tokens=params.max_tokens,
            ends=words | {params.end_id},
            seed=None if greedy else params.seed or 0,
            choices=self._choices,
        )
        async for spoken in answer:
            one.token_ids += spoken.tokens
            if params.logprobs is not None:
                for token in spoken.tokens:
                    ranked = fake_model.logprobs(token, params.logprobs)
                    one.logprobs.append({index: Logprob(value) for index, value in ranked})
            if spoken.finish is not None:
                self.finished = True
                one.finish_reason = {"abort": "cancelled"}.get(spoken.finish, spoken.finish)
                if spoken.stop_token in words:
                    one.stop_reason = spoken.stop_token
                    one.token_ids = one.token_ids[:-1]
            yield self


class Executor:
    def __init__(self, core: FakeCore) -> None:
        self.core = core

    def is_shutdown(self) -> bool:
        return self.core.is_dead


class LLM:
    def __init__(self, **kwargs: Any) -> None:
        signature("tensorrt_llm", "LLM.__init__").bind(**kwargs)
        for name in kwargs:
            if name not in (*TorchLlmArgs.model_fields, "backend"):
                raise ValueError(f"LLM got invalid argument: {name}")
        self.args = kwargs
        self.core = FakeCore()
        self._executor = Executor(self.core)
        self.requests: list[dict[str, Any]] = []
        self.is_shut = False
        self.kv_events: list[Any] = []
        self._event = itertools.count()
        if kwargs["kv_cache_config"].event_buffer_max_size:
            self.core.tell_kv = self._tell_kv
        engines.append(self)

    def _tell_kv(self, kind: str, blocks: int) -> None:
        """As KVCacheEventSerializer writes them; the buffer keeps the latest."""
        hashes = list(range(blocks))
        stored = {
            "type": "stored",
            "parent_hash": None,
            "blocks": [{"block_hash": h, "cache_level": 0} for h in hashes],
        }
        data = stored if kind == "BlockStored" else {"type": "removed", "block_hashes": hashes}
        self.kv_events.append({"event_id": next(self._event), "window_size": 512, "data": data})
        del self.kv_events[: -self.args["kv_cache_config"].event_buffer_max_size]

    @as_recorded("tensorrt_llm", "LLM.get_kv_cache_events_async")
    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:
        return self._kv_events()

    async def _kv_events(self) -> AsyncIterator[Any]:
        while self.kv_events:
            yield self.kv_events.pop(0)

    @as_recorded("tensorrt_llm", "LLM.generate_async")
    def generate_async(self, **given: Any) -> RequestOutput:
        if self.core.is_dead:
            raise RuntimeError("LLM is shutting down")
        assert given.get("lora_request") is None or isinstance(given["lora_request"], LoRARequest)
        assert given["streaming"] is True
        self.requests.append(given)
        return RequestOutput(self, given)

    @as_recorded("tensorrt_llm", "LLM.get_stats_async")
    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return self._stats()

    async def _stats(self) -> AsyncIterator[dict[str, Any]]:
        if self.core.submitted:
            kv = {"maxNumBlocks": 64, "usedNumBlocks": 0, "tokensPerBlock": 32}
            yield {"numActiveRequests": len(self.core.running), "numQueuedRequests": 0, "kvCacheStats": kv}

    @as_recorded("tensorrt_llm", "LLM.shutdown")
    def shutdown(self) -> None:
        self.is_shut = True


def install() -> None:
    """Makes `import tensorrt_llm` find this."""
    api = {
        "LLM": LLM,
        "SamplingParams": SamplingParams,
        "GuidedDecodingParams": GuidedDecodingParams,
        "KvCacheConfig": KvCacheConfig,
        "SchedulerConfig": SchedulerConfig,
        "CapacitySchedulerPolicy": CapacitySchedulerPolicy,
        "RequestError": RequestError,
        "TorchLlmArgs": TorchLlmArgs,
        "NGramDecodingConfig": NGramDecodingConfig,
        "DraftTargetDecodingConfig": DraftTargetDecodingConfig,
        "EagleDecodingConfig": EagleDecodingConfig,
    }
    install_modules(
        {
            "tensorrt_llm": {"__version__": f"{record('tensorrt_llm')['version'].split()[0]}+fake", "LLM": LLM},
            "tensorrt_llm.llmapi": api,
            "tensorrt_llm.executor": {},
            "tensorrt_llm.executor.request": {"LoRARequest": LoRARequest},
            "tensorrt_llm.lora_helper": {"LoraConfig": LoraConfig},
        }
    )
