"""A FAKE of SGLang, no part of it: recorded signatures (tests/engine/recorded/sglang.json) around `fake_model`.

It refuses every argument that SGLang's recorded release refuses. It batches nothing and needs no GPU, so passing
against it says that the adapter speaks SGLang's language, and nothing of SGLang itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from support import fake_model
from support.fake_core import FakeCore, guide
from support.fake_kv_events import MSGSPEC, Publisher
from support.fake_vllm import install_modules
from support.recorded import Recorded, as_recorded, bound, record

engines: list[Engine] = []


class ServerArgs(Recorded):
    RECORD = ("sglang", "ServerArgs")


class Process:
    def __init__(self, core: FakeCore) -> None:
        self.core = core

    def is_alive(self) -> bool:
        return not self.core.is_dead


class Watchdog:
    def __init__(self, core: FakeCore) -> None:
        self._processes = [Process(core)]


class TokenizerManager:
    def __init__(self, core: FakeCore) -> None:
        self.core = core
        self._subprocess_watchdog = Watchdog(core)

    @as_recorded("sglang", "TokenizerManager.abort_request")
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.core.aborted |= {one for one in self.core.running if abort_all or (rid and one.startswith(rid))}


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        self.args = ServerArgs(**kwargs)
        self.core = FakeCore()
        self.tokenizer_manager = TokenizerManager(self.core)
        self.requests: list[dict[str, Any]] = []
        self.is_shut = False
        self.publisher: Publisher | None = None
        if self.args.kv_events_config:
            events = bound("sglang", "KVEventsConfig", **json.loads(self.args.kv_events_config))
            assert events["publisher"] == "zmq"
            self.publisher = Publisher("sglang", events["endpoint"])
            pages = 32 // self.args.page_size
            self.core.tell_kv = lambda kind, blocks: self.publisher.publish(kind, blocks * pages, self.args.page_size)  # type: ignore[union-attr]
        engines.append(self)

    @as_recorded("sglang", "Engine.async_generate")
    async def async_generate(self, **given: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(given)
        assert given["stream"] is True
        return self._stream(given)

    async def _stream(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        params = bound("sglang", "SamplingParams", **given["sampling_params"])
        ends = frozenset() if params["ignore_eos"] else frozenset({*params["stop_token_ids"], fake_model.END})
        cached = self.core.cached(given["input_ids"], given.get("cache_salt") or "")
        seed = None if params["temperature"] == 0 else params["sampling_seed"]
        guided = {name: params[name] for name in ("json_schema", "regex", "ebnf") if name in params}
        try:
            assert not guided or self.args.grammar_backend == "xgrammar"
            assert not guided or not self.args.skip_tokenizer_init
            choices = guide(guided, "ebnf")
        except ValueError as error:
            reason = {"type": "abort", "message": str(error), "status_code": 400, "err_type": "BadRequestError"}
            yield {"output_ids": [], "meta_info": {"id": given["rid"], "finish_reason": reason}}
            return
        ids: list[int] = []
        rows: list[Any] = []
        tops: list[Any] = []
        answer = self.core.generate(
            given["rid"],
            given["input_ids"],
            max_tokens=params["max_new_tokens"],
            ends=ends,
            seed=seed,
            choices=choices,
        )
        async for spoken in answer:
            ids += spoken.tokens
            meta: dict[str, Any] = {"id": given["rid"], "cached_tokens": cached, "completion_tokens": len(ids)}
            meta["finish_reason"] = _reason(spoken.finish, spoken.stop_token, len(ids))
            if given.get("return_logprob"):
                ranked = [fake_model.logprobs(token, given["top_logprobs_num"]) for token in spoken.tokens]
                rows += [(one[0][1], one[0][0], None) for one in ranked]
                tops += [[(value, index, None) for index, value in one] for one in ranked]
                meta |= {
                    "output_token_logprobs": rows,
                    "output_top_logprobs": tops if given["top_logprobs_num"] else [],
                }
            yield {"output_ids": ids, "meta_info": meta}

    @as_recorded("sglang", "Engine.shutdown")
    def shutdown(self) -> None:
        self.is_shut = True
        if self.publisher is not None:
            self.publisher.close()


def _reason(finish: str | None, token: int | None, length: int) -> dict[str, Any] | None:
    if finish == "stop":
        return {"type": "stop", "matched": token}
    if finish == "length":
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None} if finish else None


def install() -> None:
    """Makes `import sglang` find this."""
    install_modules(
        {
            "sglang": {"__version__": f"{record('sglang')['version']}+fake", "Engine": Engine},
            **MSGSPEC,
            "sglang.srt": {},
            "sglang.srt.entrypoints": {},
            "sglang.srt.entrypoints.engine": {"Engine": Engine},
            "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        }
    )
