"""The three GPU engines' adapters over FAKES of their libraries; nothing here ran on TensorRT-LLM, vLLM or SGLang.

The fakes take exactly the arguments that were recorded from the real sources, and generate with `fake_model`.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import MANAGED_ENGINES, ConfigError, EngineConfig
from headrace.engine.engine import make_engine, make_managed
from headrace.engine.managed import ManagedRequest
from headrace.engine.request import Sampling
from headrace.engine.signatures import parameters
from support import fake_model
from support.recorded import signature
from support.served_adapter import Served, own_environment


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    with own_environment():
        yield


@pytest.fixture(params=MANAGED_ENGINES)
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    up: list[Served] = []

    def start(**settings: Any) -> Served:
        up.append(Served(request.param, fake_model.write_folder(tmp_path / "model"), **settings))
        return up[-1]

    yield start
    for one in up:
        one.engine.stop()
        assert one.library.is_shut


def expected(prompt: str, count: int, seed: int | None = None) -> list[int]:
    answer = iter(fake_model.Answer(fake_model.tokenize(prompt), seed))
    return [next(answer) for _ in range(count)]


def test_an_answer_has_the_model_s_tokens_text_and_counts(serve: Callable[..., Served]) -> None:
    served = serve()
    event, ids, text = served.answer(1, prompt=" the hot", max_tokens=40, ignore_eos=True)
    assert ids == expected(" the hot", 40)[: len(ids)]  # half a character at the end is told at the end
    assert text == b"".join(fake_model.TABLE[one] for one in ids).decode(errors="replace")
    assert event["usage"] | {"cached": 0} == {
        "prompt": 2, "cached": 0, "generated": 40, "emitted": 40, "proposed": 0, "reasoning": 0,
    }  # fmt: skip
    assert event["reason"] == "length"


def test_characters_that_are_cut_over_tokens_are_joined(serve: Callable[..., Served]) -> None:
    event, _, text = serve().answer(1, prompt="[[say=🌊💧x🚰é水]]", max_tokens=60)
    assert text == "🌊💧x🚰é水"
    assert event["stop"] == {"kind": "eos", "value": fake_model.END}
    assert event["usage"]["generated"] == event["usage"]["emitted"] + 1


def test_stops_mean_the_same_on_every_engine(serve: Callable[..., Served]) -> None:
    served = serve()
    (stop_token,) = fake_model.tokenize("x")
    by_string, _, text = served.answer(1, prompt="[[say=one two three]]", max_tokens=60, stop=["o th"])
    assert (text, by_string["stop"]) == ("one tw", {"kind": "string", "value": "o th"})
    by_token, ids, text = served.answer(2, prompt="[[say=axb]]", max_tokens=60, stop_token_ids=[stop_token])
    assert (text, by_token["stop"]) == ("a", {"kind": "token", "value": stop_token})
    assert by_token["usage"]["generated"] == len(ids) + 1
    both, ids, text = served.answer(5, prompt="[[say=ab]]", max_tokens=60, stop_token_ids=[stop_token])
    assert (text, both["stop"]) == ("ab", {"kind": "eos", "value": fake_model.END})
    assert both["usage"]["generated"] == len(ids) + 1
    ignoring, _, text = served.answer(
        3, prompt="[[say=axb]]", max_tokens=6, stop_token_ids=[stop_token], ignore_eos=True
    )
    assert (text, ignoring["stop"]) == ("a", {"kind": "token", "value": stop_token})
    on, ids, _ = served.answer(4, prompt="[[say=ab]]", max_tokens=5, ignore_eos=True)
    assert (on["reason"], on["usage"]["generated"]) == ("length", 5)  # the end token is one of the answer


def test_a_seed_fixes_the_draw_and_greedy_looks_at_none(serve: Callable[..., Served]) -> None:
    served = serve()
    drawn = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    ask = {"prompt": " the hot", "max_tokens": 12, "ignore_eos": True}
    ids = [served.answer(n, **ask, sampling={**drawn, "seed": seed})[1] for n, seed in enumerate((5, 5, 6), 1)]
    assert ids[0] == ids[1] != ids[2]
    greedy = [served.answer(n, **ask, sampling={"temperature": 0.0, "seed": seed})[1] for n, seed in ((4, 5), (5, 6))]
    assert greedy[0] == greedy[1]


def test_logprobs_are_those_of_the_drawn_tokens(serve: Callable[..., Served]) -> None:
    served = serve()
    served.answer(1, prompt=" the hot", max_tokens=4, top_logprobs=3, ignore_eos=True)
    ids, _, logprobs = served.reader.output(1)
    assert logprobs == [-0.25] * len(ids)


def test_a_cancel_is_confirmed_and_the_library_runs_nothing_more(serve: Callable[..., Served]) -> None:
    served = serve(slots=1)
    served.generate(1, prompt=" the hot", max_tokens=400, ignore_eos=True)
    served.generate(2, prompt=" the", max_tokens=2, ignore_eos=True)  # waits for the slot
    served.reader.wait(lambda _: bool(served.reader.output(1)[0]))
    assert served.ask("cancel", {"seqs": [1]}) == {"ok": True}
    assert served.finished(1)["reason"] == "cancelled"
    assert served.finished(2)["reason"] == "length"
    assert not served.library.core.running


def test_a_cancel_reaches_one_that_the_library_has_not_taken_in_yet(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(abort="on")
    monkeypatch.setattr("support.fake_core.STEP_S", 0.05)
    served.library.core.intake_s = 0.1
    served.generate(1, prompt=" the hot", max_tokens=400, ignore_eos=True)
    assert served.ask("cancel", {"seqs": [1]}) == {"ok": True}
    started = time.monotonic()
    event = served.finished(1)
    assert (event["reason"], event["usage"]["generated"]) == ("cancelled", 0)
    assert time.monotonic() - started < 5  # by itself it would take twenty seconds


def test_credit_bounds_what_is_told_and_a_preempted_answer_goes_on_where_it_was(serve: Callable[..., Served]) -> None:
    served = serve(run_ahead_tokens=8)
    served.generate(1, prompt=" the hot", max_tokens=60, ignore_eos=True, credit=4)
    served.reader.wait(lambda _: bool(served.reader.events("preempted", 1)))
    ids, _, _ = served.reader.output(1)
    assert len(ids) <= 4
    served.ask("credit", {"limits": [[1, -1]]})
    event = served.finished(1)
    ids, _, _ = served.reader.output(1)
    assert ids == expected(" the hot", 60)[: len(ids)]
    assert event["usage"]["emitted"] == len(ids) == 60
    assert served.reader.events("resumed", 1)


def test_a_salt_keeps_prefixes_apart_and_what_was_cached_is_counted(serve: Callable[..., Served]) -> None:
    served = serve()
    ask = {"prompt": " the hot" * 40, "max_tokens": 2}
    counts = [
        served.answer(n, **ask, cache_salt=salt)[0]["usage"]["cached"] for n, salt in ((1, "a"), (2, "a"), (3, "b"))
    ]
    assert counts == [0, 64, 0]


def test_what_the_engine_cannot_do_is_refused_before_it_begins(serve: Callable[..., Served]) -> None:
    served = serve()
    served.generate(1, prompt=" the", sampling={"presence_penalty": 3.0})
    event = served.finished(1)
    assert (event["type"], event["error"]["reason"]) == ("refused", "INVALID_REQUEST")
    assert event["error"]["field"] == "sampling.presence_penalty"
    assert served.ask("generate", {"requests": [{"seq": 2, "prompt": "a", "guided": {}}]}) == {"ok": True}
    assert served.finished(2)["error"]["field"] == "guided"  # it names no kind
    assert not served.library.requests


def test_one_that_fails_in_the_engine_is_alone_and_its_words_are_not_told(
    serve: Callable[..., Served], capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    served.library.core.is_failing = True
    event, _, _ = served.answer(1, prompt=" secret", max_tokens=4, ignore_eos=True)
    assert (event["reason"], event["error"]["reason"]) == ("error", "ENGINE_FAILED")
    served.library.core.is_failing = False
    assert served.answer(2, prompt=" the", max_tokens=2, ignore_eos=True)[0]["reason"] == "length"
    said = capfd.readouterr().err
    assert "a request failed: ValueError" in said
    assert "secret" not in said + str(event)


def test_a_dead_engine_ends_everything_and_says_so_from_then_on(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "sglang" not in request.node.name:  # which says nothing of it to a request
        monkeypatch.setattr("headrace.engine.async_engine.HEALTH_EVERY_S", 60)
    served = serve()
    served.generate(1, prompt=" the hot", max_tokens=400, ignore_eos=True)
    served.reader.wait(lambda _: bool(served.reader.output(1)[0]))
    served.library.core.is_dead = True
    event = served.finished(1)
    assert (event["reason"], event["error"]["reason"]) == ("error", "ENGINE_FAILED")
    deadline = time.monotonic() + 10
    while served.ask("ping", {})["ok"]:
        assert time.monotonic() < deadline
    assert served.ask("generate", {"requests": [{"seq": 2, "prompt": "a"}]})["error"]["reason"] == "ENGINE_FAILED"


def test_an_engine_that_dies_while_it_has_nothing_to_do_is_noticed(serve: Callable[..., Served]) -> None:
    served = serve()
    served.library.core.is_dead = True
    deadline = time.monotonic() + 10
    while served.ask("ping", {})["ok"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_revision_s_settings_reach_the_library_and_its_usage_reports_are_off(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 20}')
    served = serve(
        gpus="1", eager=True, adapter_path=str(adapter), slots=3, gpu_memory_fraction=0.5, kv_over_commit=2.0
    )
    served.answer(1, prompt=" the", max_tokens=2)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["DO_NOT_TRACK"]) == ("1", "1")
    args, kind = served.library.args, served.fake.__name__.removeprefix("support.fake_")
    (request,) = served.library.requests
    if kind == "vllm":
        assert (args.max_num_seqs, args.max_model_len, args.gpu_memory_utilization) == (3, 512, 0.5)
        assert args.num_gpu_blocks_override * args.block_size >= 2048
        assert request["lora_request"].lora_path == str(adapter)
        assert args.enforce_eager is True
        assert args.max_lora_rank == 32, "the next that vLLM has"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "a fork has Triton's shared memory"
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    elif kind == "sglang":
        assert (args.max_running_requests, args.context_length, args.mem_fraction_static) == (3, 512, 0.5)
        assert list(args.lora_paths) == [request["lora_path"]]
    else:
        assert (args["max_batch_size"], args["max_seq_len"]) == (3, 512)
        assert args["kv_cache_config"].max_tokens >= 2048
        assert args["lora_config"].max_lora_rank == 20
        assert args["scheduler_config"].capacity_scheduler_policy is served.fake.CapacitySchedulerPolicy.MAX_UTILIZATION
        assert request["lora_request"].lora_path == str(adapter)
        assert os.environ["TRTLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(("ranks", "said"), [(1, "0"), (2, None)])
def test_on_a_cpu_vllm_s_scheduler_and_its_one_worker_are_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, said: str | None
) -> None:
    """As two they spin on two cores."""
    monkeypatch.setattr("support.fake_vllm.Platform.on_cpu", True)
    served = Served("vllm", fake_model.write_folder(tmp_path / "model"), tensor_parallel=ranks)
    served.engine.stop()
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == said


def test_many_at_once_each_get_their_own_answer(serve: Callable[..., Served]) -> None:
    served = serve(slots=16, kv_cells=16 * 512, max_waiting=300)
    prompts = {seq: f" the hot {seq}" for seq in range(1, 201)}
    for seq, prompt in prompts.items():
        served.generate(seq, prompt=prompt, max_tokens=6, ignore_eos=True)
    for seq, prompt in prompts.items():
        assert served.finished(seq)["reason"] == "length"
        assert served.reader.output(seq)[0] == expected(prompt, 6)


@pytest.mark.parametrize(("kind", "expected"), [("tensorrt_llm", None), ("vllm", 100), ("sglang", 100)])
def test_a_higher_priority_is_a_lower_number_there(kind: str, expected: int | None, tmp_path: Path) -> None:
    fake = importlib.import_module(f"support.fake_{kind}")
    fake.install()
    folder = fake_model.write_folder(tmp_path)
    adapter = make_managed(EngineConfig(engine=kind, model_path=str(folder), context_tokens=256))
    told = threading.Event()
    adapter.start(told.set)
    adapter.submit(ManagedRequest("r", [257], 0, 1, Sampling(), frozenset(), priority=0.9))
    assert told.wait(10)
    assert fake.engines[-1].requests[0].get("priority") == expected  # the recorded TensorRT-LLM takes none
    adapter.shutdown()


@pytest.mark.parametrize("kind", MANAGED_ENGINES)
def test_a_missing_library_is_one_plain_sentence(kind: str, tmp_path: Path) -> None:
    folder = fake_model.write_folder(tmp_path)
    with pytest.raises(ConfigError, match=rf"engine {kind} needs the package .*cannot import {kind}\.$"):
        make_engine(EngineConfig(engine=kind, model_path=str(folder), context_tokens=256))


def test_a_release_without_a_needed_argument_is_one_plain_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    from support import fake_vllm

    own = signature("vllm", "AsyncEngineArgs")
    monkeypatch.setattr(
        fake_vllm.AsyncEngineArgs,
        "__signature__",
        own.replace(parameters=[one for one in own.parameters.values() if one.name != "num_gpu_blocks_override"]),
    )
    parameters.cache_clear()
    with pytest.raises(ConfigError, match="AsyncEngineArgs does not take num_gpu_blocks_override"):
        Served("vllm", fake_model.write_folder(tmp_path))
    parameters.cache_clear()
