"""A public API service that plays scripts over real gRPC, and both clients behind one face.

from support.scripted import Asker, Scripted, good, raising, start

service = await start(script, script, ...)    one script for each call, the last one for all further calls
heard = await Asker("aio")(service.target)    read a stream to its end: events, answer, error
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import Answer, AsyncClient, Client, Event, HeadraceError, RetryPolicy
from headrace.control.errors import Failure
from headrace.rpc.server import Server
from headrace.rpc.status import to_proto

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
FAST = RetryPolicy(attempts_max=3, backoff_first_s=0.001, backoff_max_s=0.002)
TIMEOUT_S = 20.0


class Play:
    """One call as a script sees it: it writes numbered events."""

    def __init__(self, request: pb.GenerateRequest, context: Any) -> None:
        self.request = request
        self.context = context
        self.sequence = 0

    async def send(self, *, sequence: int | None = None, **event: Any) -> None:
        self.sequence = self.sequence + 1 if sequence is None else sequence
        await self.context.write(pb.GenerateEvent(sequence=self.sequence, request="requests/r1", **event))

    async def accept(self, **fields: Any) -> None:
        await self.send(
            accepted=pb.Accepted(revision="models/m/revisions/0123456789ab", replica="replicas/a", attempt=1, **fields)
        )

    async def delta(self, text: str, *ids: int, sequence: int | None = None, **fields: Any) -> None:
        await self.send(delta=pb.Delta(text=text, token_ids=ids, **fields), sequence=sequence)

    async def finish(self, reason: str = "STOP", *, failure: Failure | None = None, **fields: Any) -> None:
        error: errors_pb2.Error | None = to_proto(failure) if failure else None
        usage = pb.Usage(prompt_tokens=3, generated_tokens=2, sent_tokens=2)
        number: Any = pb.FinishReason.Value(f"FINISH_REASON_{reason}")
        await self.send(terminal=pb.Terminal(finish_reason=number, usage=usage, attempts=1, error=error, **fields))


Script = Callable[[Play], Awaitable[None]]


@dataclass
class Scripted:
    """The service's side: what it saw."""

    scripts: tuple[Script, ...]
    target: str = ""
    calls: int = 0
    active: int = 0
    at: list[float] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    server: Server = field(init=False)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.calls += 1
        self.active += 1
        self.at.append(asyncio.get_running_loop().time())
        self.requests.append(request)
        try:
            await self.scripts[min(self.calls, len(self.scripts)) - 1](Play(request, context))
        finally:
            self.active -= 1


Serve = Callable[..., Awaitable[Scripted]]


async def start(*scripts: Script) -> Scripted:
    """Serve; the caller stops `.server`."""
    scripted = Scripted(scripts)
    server = Server("127.0.0.1:0")
    server.add(SERVICE, scripted)
    await server.start()
    scripted.server, scripted.target = server, server.endpoint
    return scripted


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for `condition`; fail with `what` after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.005)


@dataclass
class Heard:
    """What a reader heard of one request."""

    events: list[Event] = field(default_factory=list)
    answer: Answer | None = None
    error: HeadraceError | None = None

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Asker:
    """Reads streams with one kind of client."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def __call__(
        self, target: str | list[str], *, retry: RetryPolicy | None = FAST, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Heard:
        if not options.keys() & {"prompt", "messages", "token_ids"}:
            options["prompt"] = "hi"
        options = {"model": "chat", "timeout_s": timeout_s, **options}
        heard = Heard()
        if self.kind == "aio":
            async with AsyncClient(target, retry=retry) as client:
                try:
                    stream = client.generate(**options)
                    async for event in stream:
                        heard.events.append(event)
                    heard.answer = stream.answer
                except HeadraceError as error:
                    heard.error = error
        else:
            await asyncio.to_thread(self._blocking, heard, target, retry, options)
        return heard

    @staticmethod
    def _blocking(heard: Heard, target: str | list[str], retry: RetryPolicy | None, options: Any) -> None:
        with Client(target, retry=retry) as client:
            try:
                stream = client.generate(**options)
                for event in stream:
                    heard.events.append(event)
                heard.answer = stream.answer
            except HeadraceError as error:
                heard.error = error


async def good(play: Play) -> None:
    await play.accept(effective_effort=2, snapshot_version=7, prompt_tokens=3)
    await play.delta("Hel", 1, 2)
    await play.send(notice=pb.Notice(kind=pb.Notice.KIND_PAUSED, message="waiting", attempt=1))
    alternatives = [pb.TokenLogprob.Alternative(token_id=3, logprob=-0.5)]
    await play.delta("lo", 3, logprobs=[pb.TokenLogprob(token_id=3, logprob=-0.5, alternatives=alternatives)])
    timing = pb.Timing(total=Duration(seconds=1, nanos=500_000_000))
    await play.finish("STOP", stop=pb.StopMatch(string="\n"), timing=timing)


def raising(failure: Failure) -> Script:
    async def script(play: Play) -> None:
        raise failure

    return script
