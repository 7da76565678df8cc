"""What an engine says, as one stream without end, which Triton carries as one request after another.

    request 1   hello 1, 2, 3, ... FINAL
    request 2                            hello 1, 2, ...        with `goes_on`: the same owner, nothing of it is ended

Before release 25.03 Triton's front end keeps some kilobytes of each response until the response's request ends; a
worker that generates 200 steps/s would grow by gigabytes in an hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from headrace.engine.contract import StepBatch, WireError, decode_response, encode_op
from headrace.triton.wire import classify_error, infer_request

REQUEST_RESPONSES_MAX = 2_048
"""Responses after which the stream goes on as another request."""


EARLY_MAX = 64
"""Responses of the next request before the last one of this one; the engine ends this one first, so there are few."""


class EngineLost(Exception):
    """The engine, or the way to it, is gone; the message is a sentence for an operator."""


class EventStream:
    """Of one owner, over one call of ModelStreamInfer. Read by one task.

    Args:
        call: carries nothing else.
        owner: whose sequences it tells of.
    """

    def __init__(self, call: Any, owner: str) -> None:
        self.call = call
        self._owner = owner
        self.request = 1
        """Number of the request that is read."""
        self._number = 0
        """Of its latest response."""
        self._may_go_on = False
        self._goes_on = False
        """Whether the next request is on its way."""
        self._early: list[Any] = []
        """Responses to it that came before the end of this one: Triton keeps the order of one request's, not of two."""

    async def open(self) -> Mapping[str, Any]:
        """Begin, and return the engine's hello.

        Raises:
            EngineLost: it does not begin with one.
            grpc.RpcError, asyncio.InvalidStateError: the call has ended.
        """
        await self._ask()
        batch = self.decode(await self._response())
        if batch is None or not batch.events or batch.events[0].get("type") != "hello":
            raise EngineLost("the engine's first event is not a hello")
        if batch.number != 1:
            raise EngineLost(f"the event stream has a gap: it begins with message {batch.number}")
        self._number, hello = 1, batch.events[0]
        described = hello.get("engine")
        self._may_go_on = isinstance(described, dict) and bool(described.get("goes_on"))
        return hello

    async def read(self) -> StepBatch | None:
        """The next response; with `final` set, the last one: the engine has ended the stream. None: the call has ended.

        Raises:
            EngineLost: there is a gap, or the engine broke its contract otherwise.
            grpc.RpcError: the call has ended.
        """
        batch = self.decode(await self._response())
        if batch is None or (batch.final and not self._goes_on):
            return batch
        self._number += 1
        if batch.number != self._number:
            raise EngineLost(f"the event stream has a gap: message {batch.number} came instead of {self._number}")
        if batch.final:
            self.request += 1
            self._number, self._goes_on, batch.final = 0, False, False
        elif self._number >= REQUEST_RESPONSES_MAX and self._may_go_on and not self._goes_on:
            self._goes_on = True
            await self._ask(goes_on=True)
        return batch

    def decode(self, response: Any) -> StepBatch | None:
        """One message of the call; None: its end."""
        if response is grpc.aio.EOF:
            return None
        if response.error_message:
            raise EngineLost(f"{classify_error(response.error_message).value}: the event stream was refused")
        try:
            batch = decode_response(response.infer_response)
        except WireError as error:
            raise EngineLost(f"the engine broke its contract: {error}") from None
        if not isinstance(batch, StepBatch):
            reason = batch.error.get("message", "no reason given")
            raise EngineLost(f"the engine refused the event stream: {reason}")
        return batch

    async def _ask(self, *, goes_on: bool = False) -> None:
        document = {"owner": self._owner, "goes_on": True} if goes_on else {"owner": self._owner}
        request = infer_request(f"events-{self.request + goes_on}", encode_op("events", document))
        await self.call.write(request)

    async def _response(self) -> Any:
        """The next response to the request that is read.

        Raises:
            EngineLost: only the next one is answered.
        """
        name = f"events-{self.request}"
        if self._early and self._early[0].infer_response.id == name:
            return self._early.pop(0)
        while (response := await self.call.read()) is not grpc.aio.EOF:
            if not self._goes_on or response.error_message or response.infer_response.id == name:
                return response
            if len(self._early) >= EARLY_MAX:
                raise EngineLost(
                    f"the event stream goes on as a request whose {EARLY_MAX} responses came without an end"
                )
            self._early.append(response)
        return response
