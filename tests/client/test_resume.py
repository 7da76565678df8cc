"""A broken connection costs a reader of a resumable request nothing, or is said clearly; over real gRPC."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import RetryPolicy
from headrace.client.acknowledging import ACK_DELAY_S
from headrace.control.errors import RULES, Failure, Reason
from support.scripted import KEPT, Cut, Play, Scripted, until

TEXTS = [f"<{number}>" for number in range(12)]
LAST = len(TEXTS) + 2
TAKEN_OVER = Failure(Reason.STREAM_TAKEN_OVER, "Another call reads the stream now.")


class Story:
    """A service that keeps its events: it tells them from where the reader is, and breaks off before some of them."""

    def __init__(self, *breaks: int, end: Any = None, retention: pb.Retention | None = KEPT) -> None:
        self.breaks = list(breaks)
        self.end = end
        """What a break is; default: the plain status of a lost connection."""
        self.retention = retention

    async def __call__(self, play: Play) -> None:
        for sequence in range(play.after + 1, LAST + 1):
            if self.breaks and self.breaks[0] == sequence:
                self.breaks.pop(0)
                await (self.end or lost)(play)
            if sequence == 1:
                await play.accept(window_tokens=8, retention=self.retention)
            elif sequence < LAST:
                await play.delta(TEXTS[sequence - 2], sequence)
            else:
                await play.finish()


async def lost(play: Play) -> None:
    await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def refusing(failure: Failure) -> Any:
    async def script(play: Play) -> None:
        raise failure

    return script


async def whole(serve: Any, ask: Any) -> list[sdk.Event]:
    heard = await ask((await serve(Story())).target, on_disconnect="continue")
    assert heard.error is None
    assert len(heard.events) == LAST
    return list(heard.events)


def breaks(seed: int) -> list[int]:
    """Places in rising order, some of them several times: then a resumed call brings nothing new."""
    chance = random.Random(seed)
    return sorted(chance.choices(range(2, LAST + 1), k=chance.randint(1, 8)))


@pytest.mark.parametrize("places", [[2], [LAST], [2, 2, 2], list(range(2, LAST + 1)), *map(breaks, range(8))], ids=str)
async def test_a_stream_that_breaks_is_the_same_as_one_that_does_not(serve: Any, ask: Any, places: list[int]) -> None:
    service = await serve(Story(*places))
    heard = await ask(service.target, on_disconnect="continue")
    assert heard.error is None
    assert heard.events == await whole(serve, ask)
    assert heard.answer.text == "".join(TEXTS)
    resumes = [pb.ResumeGenerateRequest(request="requests/r1", after_sequence=place - 1) for place in places]
    assert service.requests[1:] == resumes
    form = "GenerateInteractive resume" if ask.interactive else "ResumeGenerate"
    assert {play.form for play in service.plays[1:]} == {form}


async def test_a_break_before_acceptance_is_an_ordinary_retry(serve: Any, ask: Any) -> None:
    service = await serve(Story(1))
    heard = await ask(service.target, on_disconnect="continue")
    assert heard.events == await whole(serve, ask)
    assert [type(request).__name__ for request in service.requests] == ["GenerateRequest"] * 2


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "UNKNOWN"])
async def test_what_is_a_broken_connection(serve: Any, ask: Any, code: str) -> None:
    async def broken(play: Play) -> None:
        await play.context.abort(grpc.StatusCode[code], "Received RST_STREAM")

    heard = await ask((await serve(Story(5, end=broken))).target, on_disconnect="continue", retry=None)
    assert heard.error is None
    assert heard.answer.text == "".join(TEXTS)


@pytest.mark.parametrize(
    ("story", "options", "kind"),
    [
        pytest.param(Story(5), {}, sdk.Interrupted, id="not asked for"),
        pytest.param(Story(5), {"on_disconnect": "cancel"}, sdk.Interrupted, id="or expressly not"),
        pytest.param(Story(5, retention=None), {"on_disconnect": "continue"}, sdk.Interrupted, id="not granted"),
        pytest.param(Story(5, end=refusing(TAKEN_OVER)), {"on_disconnect": "continue"}, sdk.TakenOver, id="taken over"),
    ],
)
async def test_what_is_not_resumed(
    serve: Any, ask: Any, story: Story, options: dict[str, Any], kind: type[sdk.HeadraceError]
) -> None:
    story.breaks = [5]
    service = await serve(story)
    heard = await ask(service.target, **options)
    assert type(heard.error) is kind
    assert (heard.error.calls, service.calls, service.cancelled) == (1, 1, [])
    assert heard.error.answer.text == "".join(TEXTS[:3])


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (Reason.NOT_FOUND, "no longer knows the request"),
        (Reason.EVENTS_EXPIRED, "no longer kept"),
        (Reason.NOT_RESUMABLE, "does not let this request be resumed"),
    ],
)
async def test_a_resumption_that_is_refused_says_why(serve: Any, ask: Any, reason: Reason, says: str) -> None:
    service = await serve(Story(5), refusing(Failure(reason, "No.")))
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        heard = await reading.rest()
        assert reading.stream.resume_point is None
    assert type(heard.error) is sdk.Interrupted
    assert says in str(heard.error)
    assert (heard.error.reason, heard.error.code) == (None, RULES[reason].code), "no worker was lost"
    assert (heard.error.answer.text, service.calls) == ("".join(TEXTS[:3]), 2)


async def test_a_service_that_is_busy_is_asked_again_when_it_says(serve: Any, ask: Any) -> None:
    busy = refusing(Failure(Reason.OVERLOADED, "Full.", retry_after_s=0.15))
    service = await serve(Story(5), busy, busy, Story())
    heard = await ask(service.target, on_disconnect="continue")
    assert heard.error is None
    assert heard.answer.text == "".join(TEXTS)
    assert service.at[3] - service.at[1] >= 0.29


async def test_it_is_tried_as_long_as_the_window_is_open(serve: Any, ask: Any) -> None:
    kept = pb.Retention(events_max=100, bytes_max=10_000)
    kept.window.FromMilliseconds(400)
    service = await serve(Story(5, retention=kept), lost)
    started = asyncio.get_running_loop().time()
    heard = await ask(service.target, on_disconnect="continue", retry=RetryPolicy(1, 0.01, 0.05))
    assert type(heard.error) is sdk.Interrupted
    assert "out of reach" in str(heard.error)
    assert 0.3 < asyncio.get_running_loop().time() - started < 5
    assert service.calls > 2, "a policy of one call does not count resumptions"


async def test_a_resumed_call_does_not_acknowledge_what_it_continues_behind(serve: Any, ask: Any) -> None:
    async def silent_first(play: Play) -> None:
        await asyncio.sleep(3 * ACK_DELAY_S)
        assert play.frames == []
        await Story()(play)

    heard = await ask((await serve(Story(5), silent_first)).target, on_disconnect="continue")
    assert heard.error is None


async def test_the_window_begins_anew_with_every_break(serve: Any, ask: Any) -> None:
    kept = pb.Retention(events_max=100, bytes_max=10_000)
    kept.window.FromMilliseconds(1500)

    async def slow(play: Play) -> None:
        await asyncio.sleep(0.35)
        await lost(play)

    service = await serve(Story(*range(3, 9), end=slow, retention=kept))
    heard = await ask(service.target, on_disconnect="continue")
    assert heard.error is None, "6 breaks, 2.1 s in all"
    assert service.calls == 7


async def test_a_deadline_bounds_it_too(serve: Any, ask: Any) -> None:
    service = await serve(Story(5), lost)
    started = asyncio.get_running_loop().time()
    heard = await ask(service.target, on_disconnect="continue", timeout_s=0.5)
    assert isinstance(heard.error, (sdk.Interrupted, sdk.DeadlineExceeded))
    assert asyncio.get_running_loop().time() - started < 5


async def test_a_deadline_passes_during_a_resumed_call(serve: Any, ask: Any) -> None:
    left: list[float] = []

    async def silent(play: Play) -> None:
        left.append(play.context.time_remaining())
        await asyncio.sleep(60)

    service = await serve(Story(5), silent)
    heard = await ask(service.target, on_disconnect="continue", timeout_s=0.6)
    assert type(heard.error) is sdk.DeadlineExceeded
    assert heard.error.answer.text == "".join(TEXTS[:3])
    assert left[0] < 0.63, "no fresh deadline for another call"


async def test_it_goes_back_to_the_router_that_has_the_request(serve: Any, ask: Any) -> None:
    services = [await serve(Story(3, 5, 7)), await serve(Story(3, 5, 7))]
    heard = await ask([service.target for service in services], on_disconnect="continue")
    assert heard.error is None
    assert sorted(service.calls for service in services) == [0, 4]


async def test_a_gap_after_a_resumption_is_a_gap(serve: Any, ask: Any) -> None:
    async def ahead(play: Play) -> None:
        play.sequence += 1
        await play.delta("x", 1)

    heard = await ask((await serve(Story(5), ahead)).target, on_disconnect="continue")
    assert isinstance(heard.error, sdk.SequenceGap)
    assert heard.error.metadata == {"expectedSequence": "5", "gotSequence": "6"}


async def test_another_process_goes_on_where_a_stream_was_detached(serve: Any, ask: Any) -> None:
    service: Scripted = await serve(Story())
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        first = await reading.through(5)
        assert reading.stream.resume_point == ("requests/r1", 5)
        point = reading.stream.detach()
        await reading.leave()
    assert point == ("requests/r1", 5)
    heard = await ask.resume(service.target, *point)
    assert [*first, *heard.events] == await whole(serve, ask)
    assert heard.answer.text == "".join(TEXTS[4:]), "what this reader has read"
    assert heard.answer.request == "requests/r1"
    assert service.cancelled == []
    assert [play.cancels for play in service.plays] == [0, 0]
    assert service.requests[1] == pb.ResumeGenerateRequest(request="requests/r1", after_sequence=5)


async def test_a_terminal_event_that_was_not_handed_on_is_not_read(serve: Any, ask: Any) -> None:
    go = asyncio.Event()

    async def script(play: Play) -> None:
        await play.accept(retention=KEPT)
        await play.delta("a", 1)
        await play.finish()
        await go.wait()

    service = await serve(script)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        rest = asyncio.ensure_future(reading.rest())
        await until(lambda: reading.stream.answer.usage is not None, "the terminal event is here, and no status")
        assert reading.stream.resume_point.sequence == 2
        go.set()
        assert (await rest).kinds == ["Accepted", "Delta", "Terminal"]
        assert reading.stream.resume_point.sequence == 3


async def test_a_resumed_stream_that_breaks_is_resumed(serve: Any, ask: Any) -> None:
    service = await serve(Story(8, 8, 11))
    heard = await ask.resume(service.target, "requests/r1", 5)
    assert heard.error is None
    assert heard.answer.text == "".join(TEXTS[4:])
    assert [request.after_sequence for request in service.requests] == [5, 7, 7, 10]


async def test_from_the_beginning_a_resumed_stream_is_whole(serve: Any, ask: Any) -> None:
    heard = await ask.resume((await serve(Story())).target, "requests/r1")
    assert heard.events == await whole(serve, ask)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.NOT_FOUND, sdk.NotFound),
        (Reason.EVENTS_EXPIRED, sdk.RequestError),
        (Reason.NOT_RESUMABLE, sdk.RequestError),
        (Reason.STREAM_TAKEN_OVER, sdk.TakenOver),
    ],
)
async def test_what_cannot_be_resumed_is_refused_as_it_is(
    serve: Any, ask: Any, reason: Reason, kind: type[sdk.HeadraceError]
) -> None:
    service = await serve(refusing(Failure(reason, "No.", metadata={"firstSequence": "9"})))
    heard = await ask.resume(service.target, "requests/r1", 5)
    assert type(heard.error) is kind
    assert (heard.error.reason, service.calls) == (reason, 1)
    assert heard.error.metadata == {"firstSequence": "9"}


async def test_the_router_that_has_a_request_is_found(serve: Any, ask: Any) -> None:
    unknown = refusing(Failure(Reason.NOT_FOUND, "No."))
    services = [await serve(unknown), await serve(Story(9)), await serve(unknown)]
    for _ in range(3):  # wherever chance lets it start
        services[1].scripts[0].breaks[:] = [9]
        heard = await ask.resume([service.target for service in services], "requests/r1", 5)
        assert heard.error is None
        assert heard.answer.text == "".join(TEXTS[4:])
    assert services[1].calls == 6, "and goes on there"


async def test_a_name_that_cannot_be_sent_is_refused_without_a_call(ask: Any) -> None:
    for arguments, field in (((5,), "request"), (("requests/r1", -1), "after_sequence")):
        error = (await ask.resume("127.0.0.1:1", *arguments)).error
        assert isinstance(error, sdk.InvalidRequest)
        assert error.field == field


async def test_only_what_can_be_resumed_is_detached(serve: Any, ask: Any) -> None:
    service = await serve(Story())
    async with ask.client(service.target) as client:
        for options in ({}, {"on_disconnect": "continue"}):
            reading = ask.reading(client.generate("hi", model="chat", **options))
            if not options:
                await reading.through(1)
            assert reading.stream.resume_point is None
            with pytest.raises(RuntimeError, match="detached"):
                reading.stream.detach()
            await reading.rest()


async def test_a_wire_that_is_cut_twenty_times(serve: Any, ask: Any) -> None:
    """The real thing: whatever gRPC makes of a lost connection, with frames on their way in both directions."""
    pieces = 400

    async def script(play: Play) -> None:
        if play.after == 0:
            await play.accept(window_tokens=8, retention=KEPT)
        for sequence in range(play.sequence + 1, pieces + 1):
            await play.delta(f"{sequence} ", sequence)
            if sequence % 20 == 0:
                await asyncio.sleep(0.002)
        await play.finish()

    service = await serve(script)
    async with Cut(service.target) as wire, ask.client(wire.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        events: list[Any] = []
        for cut in range(1, 21):
            events += await reading.through(20 * cut - 1)
            wire.cut()
        heard = await reading.rest()
    events += heard.events
    assert heard.error is None
    assert [event.sequence for event in events] == list(range(1, pieces + 2))
    assert heard.answer.text == "".join(f"{sequence} " for sequence in range(2, pieces + 1))
    assert service.calls > 5
    await until(lambda: service.active == 0, "no call is left behind")
