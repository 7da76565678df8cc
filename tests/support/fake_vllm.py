"""A FAKE of vLLM, no part of it: recorded signatures (tests/engine/recorded/vllm.json) around `fake_model`.

It refuses every argument that vLLM's recorded release refuses. It batches nothing and needs no GPU, so passing against
it says that the adapter speaks vLLM's language, and nothing of vLLM itself.
"""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support import fake_model
from support.fake_core import FakeCore, guide
from support.fake_kv_events import MSGSPEC, Publisher
from support.recorded import Recorded, as_recorded, record

engines: list[AsyncLLM] = []


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class EngineDeadError(Exception):
    pass


class AsyncEngineArgs(Recorded):
    RECORD = ("vllm", "AsyncEngineArgs")


class SamplingParams(Recorded):
    RECORD = ("vllm", "SamplingParams")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= self.given.get(name, 0) <= 2:
                raise ValueError(name)
        if self.given.get("stop") and not self.given.get("detokenize", True):
            raise ValueError("stop strings are only supported when detokenize is True")


class StructuredOutputsParams(Recorded):
    RECORD = ("vllm", "StructuredOutputsParams")


class CompletionOutput(Recorded):
    RECORD = ("vllm", "CompletionOutput")


class RequestOutput(Recorded):
    RECORD = ("vllm", "RequestOutput.__init__")


class KVEventsConfig(Recorded):
    RECORD = ("vllm", "KVEventsConfig")


class LoRARequest(Recorded):
    RECORD = ("vllm", "LoRARequest")


class StatLoggerBase:
    pass


class Logprob:
    def __init__(self, logprob: float, rank: int) -> None:
        self.logprob, self.rank, self.decoded_token = logprob, rank, None


class Platform:
    """Where it runs: not on a CPU, unless a test says so."""

    on_cpu = False

    @as_recorded("vllm", "Platform.is_cpu")
    def is_cpu(self) -> bool:
        return self.on_cpu


class SchedulerStats:
    def __init__(self, running: int) -> None:
        self.num_running_reqs, self.num_waiting_reqs, self.kv_cache_usage = running, 0, 0.0


class AsyncLLM:
    def __init__(self, args: AsyncEngineArgs, loggers: Any) -> None:
        self.args, self.core = args, FakeCore()
        self.loggers = [make(None, 0) for make in loggers or ()]
        self.requests: list[dict[str, Any]] = []
        self.is_shut = False
        self.publisher: Publisher | None = None
        events = args.kv_events_config
        if events is not None:
            assert isinstance(events, KVEventsConfig)
            assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
            self.publisher = Publisher("vllm", events.endpoint)
            self.core.tell_kv = lambda kind, blocks: self.publisher.publish(kind, blocks, args.block_size)  # type: ignore[union-attr]
        self.adapters: list[LoRARequest] = []
        engines.append(self)

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, start_engine_loop: bool = True, usage_context: Any = None, stat_loggers: Any = None
    ) -> AsyncLLM:
        assert isinstance(engine_args, AsyncEngineArgs)
        return cls(engine_args, stat_loggers)

    @as_recorded("vllm", "AsyncLLM.generate")
    def generate(self, **given: Any) -> AsyncIterator[RequestOutput]:
        self.requests.append(given)
        return self._generate(**given)

    async def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, lora_request: Any = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        if self.core.is_dead:
            raise EngineDeadError
        assert set(prompt) <= {"prompt_token_ids", "cache_salt"}
        assert lora_request is None or lora_request in self.adapters, "it would be loaded with the first request"
        params = sampling_params
        cached = self.core.cached(prompt["prompt_token_ids"], prompt.get("cache_salt", ""))
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else {fake_model.END})
        seed = None if params.temperature == 0 else params.seed
        guided = params.structured_outputs.given if params.structured_outputs is not None else {}
        choices = guide(guided, "grammar")
        answer = self.core.generate(
            request_id, prompt["prompt_token_ids"], max_tokens=params.max_tokens, ends=stops, seed=seed, choices=choices
        )
        assert params.output_kind is RequestOutputKind.DELTA
        try:
            async for spoken in answer:
                for logger in self.loggers:
                    logger.record(SchedulerStats(len(self.core.running)), None, None, engine_idx=0)
                one = CompletionOutput(
                    index=0,
                    text="",
                    token_ids=spoken.tokens,
                    cumulative_logprob=None,
                    logprobs=self._logprobs(spoken.tokens, params.logprobs),
                    finish_reason=spoken.finish,
                    stop_reason=spoken.stop_token if spoken.stop_token in (params.stop_token_ids or ()) else None,
                )
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=prompt["prompt_token_ids"],
                    prompt_logprobs=None,
                    outputs=[one],
                    finished=spoken.finish is not None,
                    num_cached_tokens=cached,
                )
        except RuntimeError:
            raise EngineDeadError from None

    def _logprobs(self, tokens: list[int], top: int | None) -> Any:
        if top is None:
            return None
        found = []
        for token in tokens:
            ranked = fake_model.logprobs(token, top)
            found.append({index: Logprob(value, rank + 1) for rank, (index, value) in enumerate(ranked)})
        return found

    @as_recorded("vllm", "AsyncLLM.abort")
    async def abort(self, request_id: str, internal: bool = False) -> None:
        if request_id in self.core.running:
            self.core.aborted.add(request_id)

    @as_recorded("vllm", "AsyncLLM.add_lora")
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """vLLM reads the folder in its engine process, and tells what it met there."""
        folder = Path(lora_request.lora_path)
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.args.max_lora_rank or (folder / "misfit").exists():
            raise ValueError(folder)
        self.adapters.append(lora_request)
        return True

    async def check_health(self) -> None:
        if self.core.is_dead:
            raise EngineDeadError

    @as_recorded("vllm", "AsyncLLM.shutdown")
    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut = True
        if self.publisher is not None:
            self.publisher.close()


def install() -> None:
    """Makes `import vllm` find this. For a process of its own, or with `monkeypatch.delitem` afterwards."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{record('vllm')['version']}+fake", "SamplingParams": SamplingParams},
        **MSGSPEC,
        "vllm.config": {"KVEventsConfig": KVEventsConfig},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.sampling_params": {
            "RequestOutputKind": RequestOutputKind,
            "SamplingParams": SamplingParams,
            "StructuredOutputsParams": StructuredOutputsParams,
        },
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
    }
    install_modules(contents)


def install_modules(contents: dict[str, dict[str, Any]]) -> None:
    """Modules with these contents, under these names."""
    for name, content in contents.items():
        module = types.ModuleType(name, "A fake for tests.")
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
