"""What an engine says, read over several of Triton's requests, whose responses may come in another order."""

import grpc
import pytest

from headrace.engine.contract import StepBatch, encode_step
from headrace.triton import event_stream
from headrace.triton.event_stream import EngineLost, EventStream
from support.scripted_engine import response

MAX = 4


class Call:
    """Stands for a call of ModelStreamInfer: gives what it was told to, keeps what was written."""

    def __init__(self, *responses):
        self.responses = list(responses)
        self.written = []

    async def write(self, request):
        self.written.append((request.id, request.raw_input_contents[1][4:].decode()))

    async def read(self):
        return self.responses.pop(0) if self.responses else grpc.aio.EOF


def said(request, number, *events, final=False):
    batch = StepBatch(number=number, steps=1, events=list(events) or [{"type": "news", "of": [request, number]}])
    return response(encode_step(batch), request_id=f"events-{request}", final=final)


def hello(request, *, goes_on=True):
    return said(request, 1, {"type": "hello", "contract": "headrace.engine.v1", "engine": {"goes_on": goes_on}})


@pytest.fixture(autouse=True)
def short_requests(monkeypatch):
    monkeypatch.setattr(event_stream, "REQUEST_RESPONSES_MAX", MAX)


async def heard(stream):
    """What is read until the call ends: events, and whether the engine has ended the stream."""
    found, is_final = [], False
    while (batch := await stream.read()) is not None:
        is_final |= batch.final
        found += [event["of"] for event in batch.events if event["type"] == "news"]
    return found, is_final


async def test_it_asks_for_the_next_request_in_time_and_reads_on_behind_the_end_of_the_first():
    last = [said(1, n) for n in range(2, 6)] + [said(1, 6, final=True)]
    call = Call(hello(1), *last, hello(2), said(2, 2), said(2, 3))
    stream = EventStream(call, "me")
    assert (await stream.open())["type"] == "hello"
    assert await heard(stream) == ([[1, n] for n in range(2, 7)] + [[2, 2], [2, 3]], False)
    assert call.written == [("events-1", '{"owner":"me"}'), ("events-2", '{"owner":"me","goes_on":true}')]


async def test_what_comes_early_of_the_next_request_waits_for_the_end_of_this_one():
    first = [said(1, 2), said(1, 3), said(1, 4)]
    call = Call(hello(1), *first, hello(2), said(2, 2), said(1, 5), said(2, 3), said(1, 6, final=True), said(2, 4))
    stream = EventStream(call, "me")
    await stream.open()
    found, _ = await heard(stream)
    assert found == [[1, 2], [1, 3], [1, 4], [1, 5], [1, 6], [2, 2], [2, 3], [2, 4]]


async def test_what_came_early_may_be_so_much_that_the_next_request_is_due_again():
    first = [said(1, 2), said(1, 3), said(1, 4)]
    early = [hello(2), *(said(2, n) for n in range(2, 7))]
    late = [said(1, 5, final=True), said(2, 7, final=True), hello(3), said(3, 2)]
    stream = EventStream(Call(hello(1), *first, *early, *late), "me")
    await stream.open()
    found, is_final = await heard(stream)
    assert found == [[1, n] for n in range(2, 6)] + [[2, n] for n in range(2, 8)] + [[3, 2]]
    assert not is_final


@pytest.mark.parametrize(
    ("responses", "words"),
    [
        ((said(1, 2), said(1, 4)), "gap: message 4 came instead of 3"),
        ((*(said(1, n) for n in range(2, 5)), said(1, 6, final=True)), "gap: message 6 came instead of 5"),
        ((*(said(1, n) for n in range(2, 5)), said(1, 5, final=True), said(2, 2)), "gap: message 2 came instead of 1"),
    ],
    ids=["within a request", "at its end", "at the beginning of the next"],
)
async def test_a_gap_is_a_loss(responses, words):
    stream = EventStream(Call(hello(1), *responses), "me")
    await stream.open()
    with pytest.raises(EngineLost, match=words):
        await heard(stream)


async def test_an_end_that_was_not_asked_for_is_the_engine_s():
    stream = EventStream(Call(hello(1), said(1, 2), said(1, 3, final=True)), "me")
    await stream.open()
    _, is_final = await heard(stream)
    assert is_final


async def test_an_engine_that_cannot_go_on_is_never_asked_to():
    call = Call(hello(1, goes_on=False), *(said(1, n) for n in range(2, 20)))
    stream = EventStream(call, "me")
    await stream.open()
    found, _ = await heard(stream)
    assert len(found) == 18
    assert len(call.written) == 1


async def test_a_request_that_never_ends_beside_the_next_one_is_no_queue_without_end(monkeypatch):
    monkeypatch.setattr(event_stream, "EARLY_MAX", 2)
    first = [hello(1), *(said(1, n) for n in range(2, MAX + 1))]
    stream = EventStream(Call(*first, hello(2), said(2, 2), said(2, 3), said(1, MAX + 1, final=True)), "me")
    await stream.open()
    with pytest.raises(EngineLost, match="2 responses came without an end"):
        await heard(stream)
