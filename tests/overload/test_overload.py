"""What `make overload` counts, on figures of the tests' own: a storm of its own would take minutes."""

from __future__ import annotations

import base64
import urllib.parse
from collections import Counter
from typing import Any

import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from overload import levels, truth
from overload.floor import FLOOR
from overload.generator import Call, Generator, Job, Request
from overload.prober import Trailers
from overload.rig import SLO_S
from overload.truth import Held

SECONDS = 13.0


def request(at: float = 5.0, took_s: float = 1.0, ttft_s: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    call = {"took_ms": 1000 * took_s, "said": "OK", "events": 3, "ttft_ms": ttft_s and 1000 * ttft_s}
    made = {"at": at, "priority": 3, "took_s": took_s, "end": "LENGTH", "broken": "", "calls": [call]}
    return {**made, **fields}


def refused(said: str, took_ms: float) -> dict[str, Any]:
    call = {"took_ms": took_ms, "said": said, "events": 0, "ttft_ms": None}
    return request(end=f"refused: {said}", calls=[call])


def figures(*requests: dict[str, Any], probed: tuple[tuple[float, str], ...] = ()) -> dict[str, Any]:
    told = {"requests": list(requests), "lags_ms": [], "cpu": 0.0}
    return levels.figures(told, list(probed), SECONDS)


@pytest.mark.parametrize(
    ("wanted", "counts"),
    [
        (request(), True),
        (request(at=1.0), False),  # over before queues were full
        (request(at=12.5), False),  # over after the last arrival
        (request(ttft_s=SLO_S + 0.1, took_s=6.0), False),
        (request(took_s=levels.DEADLINE_S + 0.1, at=0.0), False),
        (request(end="INTERRUPTED STREAM_INTERRUPTED"), False),
    ],
)
def test_goodput_is_what_ended_well_and_in_time(wanted: dict[str, Any], *, counts: bool) -> None:
    assert figures(wanted)["goodput"] == pytest.approx(counts / (SECONDS - levels.RAMP_S))


def test_a_wait_that_ended_in_vain_is_no_refusal_at_once() -> None:
    found = figures(
        refused("OVERLOADED wait", 2.0),
        refused("QUOTA_EXCEEDED concurrency", 4.0),
        refused("OVERLOADED shed", 900.0),
        refused("QUEUE_TIMEOUT queue", 3000.0),
        request(),
        probed=((7.0, FLOOR), (1.0, "OVERLOADED wait"), (80.0, "accepted"), (3000.0, "QUEUE_TIMEOUT queue")),
    )
    assert (found["refuse_ms"]["count"], found["refuse_ms"]["max"]) == (2, 4.0)
    assert (found["probed_refuse_ms"]["count"], found["probed_refuse_ms"]["max"]) == (1, 1.0)
    assert (found["floor_ms"]["count"], found["floor_ms"]["max"]) == (1, 7.0)
    assert (found["accepted"], sum(found["refused"].values())) == (1, 4)
    assert found["by_priority"]["STANDARD"] == {"asked": 5, "well": 1, "late": 2}
    slow = figures(refused("DEADLINE_UNMEETABLE end", 9500.0), refused("DEADLINE_UNMEETABLE end", 5.0))
    assert (slow["by_priority"]["STANDARD"]["late"], slow["late"]) == (1, 1), "a reason does not tell how long it took"


def test_what_a_refusal_says_is_read_from_its_trailers() -> None:
    failure = Failure(Reason.OVERLOADED, "At 100 %: too much.", metadata={"bound": "wait"}, retry_after_s=1.0)
    code, message, trailers = status.encode(failure)
    headers = {"grpc-status": str(code.value[0]), "grpc-message": urllib.parse.quote(message)}
    for name, value in trailers:
        headers[name] = base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
    assert Trailers(headers).said == "OVERLOADED wait"
    assert Trailers({"grpc-status": "14"}).said == "UNAVAILABLE"
    assert Trailers({"grpc-status": "8", "grpc-message": FLOOR}).said == FLOOR


async def test_the_caller_apart_hears_of_each_refusal_once() -> None:
    async with levels.floor(first=False) as address:
        job = {"routers": [address, address], "floor": address, "model": "m", "tokens": 1, "tenant_key": "x-tenant"}
        seen = await levels.spawn("prober.py", {**job, "seed": 1, "rate": 200.0, "seconds": 0.5, "realtime": False})
    assert len(seen) > 30
    assert {said for _, said in seen} == {FLOOR}
    assert all(took_ms > 0 for took_ms, _ in seen)


def event(sequence: int, kind: str) -> pb.GenerateEvent:
    made = pb.GenerateEvent(sequence=sequence)
    getattr(made, kind).SetInParent()
    return made


@pytest.mark.parametrize(
    ("told", "is_broken"),
    [
        (((1, "accepted"), (2, "delta"), (3, "terminal")), False),
        (((1, "accepted"), (3, "delta"), (4, "terminal")), True),
        (((1, "accepted"), (2, "terminal"), (3, "delta")), True),
        (((1, "accepted"), (2, "terminal"), (3, "terminal")), True),
    ],
)
def test_a_stream_that_breaks_the_contract_is_noticed(told: tuple[tuple[int, str], ...], *, is_broken: bool) -> None:
    generator = Generator(Job([], "m", 1, 1.0, 1.0))
    wanted, call = Request(0.0, 3, "one"), Call()
    for sequence, kind in told:
        generator._take(event(sequence, kind), wanted, call, 0.0)
    assert bool(wanted.broken) is is_broken


def test_what_is_left_is_missed() -> None:
    before = Held({}, {"r1 tasks": 25.0, "r1 retry budget": 9.0, "r1 memory, MiB": 60.0})
    rows = truth.rows(before, Held({"r1 requests_active": 0.0}, dict(before.levels)), 1.0)
    assert all(met for *_, met in rows)
    worse = {"r1 tasks": 28.0, "r1 retry budget": 0.5, "r1 memory, MiB": 80.0}
    rows = truth.rows(before, Held({"r1 requests_active": 1.0}, worse), 21.0)
    assert not any(met for *_, met in rows)


def test_a_quantile_is_the_upper_bound_of_its_bucket() -> None:
    counts = Counter({0.001: 50.0, 0.005: 98.0, 0.01: 100.0, float("inf"): 100.0})
    assert [truth.quantile(counts, share) for share in (0.5, 0.9, 0.99)] == [0.001, 0.005, 0.01]
    assert truth.quantile(Counter(), 0.5) == 0.0
