"""Both clients against the real Router, with an engine that generates exactly as far as its credit goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from router.harness import Harness, running

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from support.scripted import Asker, Cut, until

WINDOW = 16


@dataclass
class Engine:
    """Serves all dispatches of a harness; `produced` counts the tokens of the latest one."""

    harness: Harness
    tokens: int = 400
    produced: int = 0
    limit: int = 0
    is_cancelled: bool = False

    async def run(self) -> None:
        while True:
            await self._attempt(await self.harness.scheduler.dispatches.get())

    async def _attempt(self, dispatch: sp.Dispatch) -> None:
        scheduler = self.harness.scheduler
        self.produced, self.limit, self.is_cancelled = 0, dispatch.credit_limit, False
        await scheduler.admit(dispatch.attempt)
        while self.produced < self.tokens and not self.is_cancelled:
            while not scheduler.credits.empty():
                self.limit = max(self.limit, scheduler.credits.get_nowait().limit)
            self.is_cancelled = not scheduler.cancels.empty()
            if self.produced < self.limit and not self.is_cancelled:
                self.produced += 1
                await scheduler.deltas(dispatch.attempt, f"{self.produced} ")
            await asyncio.sleep(0.001)
        while not scheduler.cancels.empty():
            scheduler.cancels.get_nowait()
        reason = pb.FINISH_REASON_CANCELLED if self.is_cancelled else pb.FINISH_REASON_LENGTH
        usage = pb.Usage(prompt_tokens=3, generated_tokens=self.produced)
        await scheduler.end(dispatch.attempt, reason, usage=usage)


@contextlib.asynccontextmanager
async def router(**settings: Any) -> AsyncIterator[tuple[Harness, Engine]]:
    async with running(**settings) as harness:
        engine = Engine(harness)
        running_engine = asyncio.ensure_future(engine.run())
        try:
            yield harness, engine
        finally:
            running_engine.cancel()


OPTIONS: dict[str, Any] = {
    "prompt": "hi",
    "model": "chat",
    "max_tokens": 32,
    "window_tokens": WINDOW,
    "timeout_s": 20.0,
}


async def test_a_whole_answer_is_acknowledged(ask: Asker) -> None:
    async with router() as (harness, engine):
        engine.tokens = 100
        heard = await ask(harness.target, **OPTIONS)
    assert heard.error is None
    assert heard.answer is not None
    assert heard.answer.text == "".join(f"{number} " for number in range(1, 101))
    usage = heard.answer.usage
    assert usage is not None
    assert (usage.generated_tokens, usage.sent_tokens) == (100, 100)
    if ask.interactive:
        assert usage.acknowledged_tokens >= 100 - WINDOW
    else:
        assert usage.acknowledged_tokens == 0


@pytest.mark.parametrize("kind", ["aio", "blocking"])
async def test_a_reader_that_stops_stops_the_engine_within_the_window(kind: str) -> None:
    ask = Asker(kind)
    async with router() as (harness, engine), ask.client(harness.target) as client:
        reading = ask.reading(client.generate(**OPTIONS))
        seen = 0
        while seen < 50:
            event = await reading.next()
            seen += len(event.token_ids) if isinstance(event, sdk.Delta) else 0
        await until(lambda: engine.produced == engine.limit, "the engine waits for credit")
        await asyncio.sleep(0.3)
        assert engine.produced == engine.limit
        assert engine.produced - seen <= WINDOW
        heard = await reading.rest()
        assert heard.error is None


async def test_cancel_and_leave_end_the_request_with_its_usage(ask: Asker) -> None:
    async with router() as (harness, engine), ask.client(harness.target) as client:
        for policy in ("cancel", "continue"):
            reading = ask.reading(client.generate(on_disconnect=policy, **OPTIONS))
            await reading.through(5)
            reading.stream.cancel()
            heard = await reading.rest()
            assert type(heard.error) is sdk.Cancelled
            if ask.interactive or policy == "continue":
                assert heard.error.answer is not None
                assert heard.error.answer.usage is not None
                assert heard.error.answer.usage.generated_tokens >= 3
            await until(lambda: engine.is_cancelled, "cancelled")
            reading = ask.reading(client.generate(on_disconnect=policy, **OPTIONS))
            await reading.through(5)
            await reading.leave()
            await until(lambda: engine.is_cancelled, "left")
        await until(lambda: len(harness.service.sessions) == harness.service.sessions.detached, "nothing runs")


async def test_a_cut_wire_costs_nothing(ask: Asker) -> None:
    async with router() as (harness, engine), Cut(harness.target) as wire, ask.client(wire.target) as client:
        engine.tokens = 300
        reading = ask.reading(client.generate(on_disconnect="continue", **OPTIONS))
        events: list[Any] = []
        for _ in range(8):
            for _ in range(10):
                events.append(await reading.next())
            wire.cut()
        heard = await reading.rest()
        events += heard.events
    assert heard.error is None
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert heard.answer is not None
    assert heard.answer.text == "".join(f"{number} " for number in range(1, 301))
    assert heard.answer.token_ids == tuple(
        t for event in events if isinstance(event, sdk.Delta) for t in event.token_ids
    )


async def test_detached_shown_taken_over_and_cancelled(ask: Asker) -> None:
    async with router() as (harness, engine), ask.client(harness.target) as client:
        engine.tokens = 10_000
        reading = ask.reading(client.generate(on_disconnect="continue", **OPTIONS))
        first = await reading.through(4)
        point = reading.stream.detach()
        await reading.leave()
        await until(lambda: harness.service.sessions.detached == 1, "detached")
        info = await ask.wait(client.get_request, point.request)
        assert (info.state, info.attached, info.finish_reason) == (sdk.RequestState.DECODE, False, None)
        one = ask.reading(client.resume(*point))
        events = await one.through(point.sequence + 2)
        assert [event.sequence for event in [*first, *events]] == list(range(1, point.sequence + 3))
        other = ask.reading(client.resume(*point))
        again = await other.through(point.sequence + 2)
        assert again == events, "the same to the byte"
        assert type((await one.rest()).error) is sdk.TakenOver
        rest = asyncio.ensure_future(other.rest())
        info = await ask.wait(client.cancel_request, point.request)
        assert info.finish_reason is sdk.FinishReason.CANCELLED
        heard = await rest
        assert type(heard.error) is sdk.Cancelled
        assert heard.kinds[-1] == "Terminal"


async def test_what_was_not_made_to_be_resumed_is_refused(ask: Asker) -> None:
    async with router() as (harness, _engine), ask.client(harness.target) as client:
        reading = ask.reading(client.generate(**OPTIONS))
        (accepted,) = await reading.through(1)
        heard = await ask.reading(client.resume(accepted.request)).rest()  # type: ignore[union-attr]
        assert type(heard.error) is sdk.RequestError
        assert heard.error.reason is Reason.NOT_RESUMABLE
        await reading.leave()
        assert type((await ask.reading(client.resume("requests/none")).rest()).error) is sdk.NotFound
