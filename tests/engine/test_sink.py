"""The sender thread: merges what waits, numbers what it sends, notices that nobody listens, and always ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.engine.contract import StepBatch, Tensor
from headrace.engine.sink import TOKENS_MAX, StreamSink


class Transport:
    """A response sender whose sending can be held up."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], bool]] = []
        self.may_send = threading.Event()
        self.may_send.set()
        self.is_sending = threading.Event()
        self.is_gone = False
        self.error: Exception | None = None

    def send(self, tensors: Sequence[Tensor], *, is_final: bool) -> None:
        self.is_sending.set()
        assert self.may_send.wait(10)
        if self.error is not None and tensors:
            raise self.error
        self.sent.append(({name: array.tolist() for name, array in tensors}, is_final))

    def is_cancelled(self) -> bool:
        return self.is_gone


def batch(*ids: int) -> StepBatch:
    return StepBatch(steps=1, ended_ns=5, seqs=[7], token_counts=[len(ids)], token_ids=list(ids), text_lengths=[0])


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def sink(transport: Transport) -> StreamSink:
    sink = StreamSink(transport)
    sink.start()
    return sink


def test_what_waits_together_travels_together(transport: Transport, sink: StreamSink) -> None:
    transport.may_send.clear()
    sink.put(batch(1))
    assert transport.is_sending.wait(10)
    for token in range(2, 6):
        sink.put(batch(token))
    sink.close(batch(6))
    transport.may_send.set()
    sink.join(10)
    (first, first_final), (rest, rest_final) = transport.sent
    assert (first["step"], first["token_ids"], first_final) == ([1, 1, 5], [1], False)
    assert (rest["step"], rest["token_ids"], rest_final) == ([2, 5, 5], [2, 3, 4, 5, 6], True)


def test_a_stream_without_anything_to_say_still_ends(transport: Transport, sink: StreamSink) -> None:
    sink.close(None)
    sink.join(10)
    assert transport.sent == [({}, True)]


def test_a_client_that_went_is_noticed_and_its_request_is_ended(transport: Transport, sink: StreamSink) -> None:
    transport.is_gone = True
    sink.join(10)
    assert sink.is_lost
    assert transport.sent == [({}, True)], "Triton keeps a request until FINAL"
    sink.put(batch(1))
    sink.close(batch(2))
    assert len(transport.sent) == 1


def test_a_transport_that_fails_is_a_lost_client(
    transport: Transport, sink: StreamSink, capfd: pytest.CaptureFixture[str]
) -> None:
    transport.error = RuntimeError("a secret")
    sink.put(batch(1))
    sink.join(10)
    assert sink.is_lost
    assert transport.sent == [({}, True)]
    written = capfd.readouterr().err
    assert "RuntimeError" in written
    assert "secret" not in written


def test_a_transport_that_is_far_behind_is_called_congested(transport: Transport, sink: StreamSink) -> None:
    transport.may_send.clear()
    sink.put(batch(1))
    assert transport.is_sending.wait(10)
    assert not sink.is_congested
    sink.put(batch(*range(TOKENS_MAX + 1)))
    assert sink.is_congested
    transport.may_send.set()
    sink.close(None)
    sink.join(10)
    assert not sink.is_congested
