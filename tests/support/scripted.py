"""A public API service that plays scripts over real gRPC, and both clients behind one face.

from support.scripted import Asker, Scripted, good, raising, start

service = await start(script, script, ...)    one script for each call, the last one for all further calls
heard = await Asker("aio")(service.target)    read a stream to its end: events, answer, error
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import Answer, AsyncClient, Client, Event, HeadraceError, RetryPolicy
from headrace.control.errors import Failure, Reason
from headrace.rpc.server import Server
from headrace.rpc.status import to_proto

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
FAST = RetryPolicy(attempts_max=3, backoff_first_s=0.001, backoff_max_s=0.002)
TIMEOUT_S = 20.0
CANCELLED = Failure(Reason.CLIENT_CANCELLED, "The request was cancelled.")
KEPT = pb.Retention(events_max=1000, bytes_max=1_000_000, window=Duration(seconds=10))


class Play:
    """One call as a script sees it: it writes numbered events, behind those that a resumed call has."""

    def __init__(self, message: pb.GenerateRequest | pb.ResumeGenerateRequest, form: str, context: Any) -> None:
        self.request: Any = message
        self.form = form
        self.context = context
        self.after = message.after_sequence if isinstance(message, pb.ResumeGenerateRequest) else 0
        self.sequence = self.after
        self.frames: list[pb.ClientFrame] = []
        """What came after the first."""
        self.is_half_closed = False
        self.is_deaf = False
        """Set by a script that lets a cancel frame pass."""
        self.is_cancelled = False

    @property
    def acknowledged(self) -> list[int]:
        """The sequences that were acknowledged, as they came."""
        return [frame.acknowledge.sequence for frame in self.frames if frame.HasField("acknowledge")]

    @property
    def cancels(self) -> int:
        """How often a cancel frame came."""
        return sum(frame.HasField("cancel") for frame in self.frames)

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
    requests: list[Any] = field(default_factory=list)
    plays: list[Play] = field(default_factory=list)
    records: dict[str, pb.Request] = field(default_factory=dict)
    """What GetRequest and CancelRequest answer."""
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _running: list[tuple[Play, asyncio.Future[None]]] = field(default_factory=list)
    server: Server = field(init=False)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        await self._play(Play(request, "Generate", context), None)

    async def ResumeGenerate(self, request: pb.ResumeGenerateRequest, context: Any) -> None:
        await self._play(Play(request, "ResumeGenerate", context), None)

    async def GenerateInteractive(self, frames: Any, context: Any) -> None:
        first = await anext(aiter(frames), None)
        if first is None:  # the call was over before its first frame came
            return
        kind = first.WhichOneof("frame")
        assert kind in ("start", "resume")
        await self._play(Play(getattr(first, kind), f"GenerateInteractive {kind}", context), frames)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.Request:
        self.asked.append(request.request)
        return self._record(request.request)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Any) -> pb.Request:
        self.cancelled.append(request.request)
        for play, script in self._running:
            play.is_cancelled = True
            script.cancel()
        return self._record(request.request)

    def _record(self, name: str) -> pb.Request:
        if name not in self.records:
            raise Failure(Reason.NOT_FOUND, f"{name} is not known.")
        return self.records[name]

    async def _play(self, play: Play, frames: Any) -> None:
        self.calls += 1
        self.active += 1
        self.at.append(asyncio.get_running_loop().time())
        self.requests.append(play.request)
        self.plays.append(play)
        script = asyncio.ensure_future(self.scripts[min(self.calls, len(self.scripts)) - 1](play))
        self._running.append((play, script))
        listening = asyncio.ensure_future(self._listen(frames, play, script)) if frames is not None else None
        try:
            await script
        except asyncio.CancelledError:
            if not play.is_cancelled:
                raise
            if play.sequence:
                await play.finish("CANCELLED", failure=CANCELLED)
            raise CANCELLED from None
        finally:
            self._running.remove((play, script))
            script.cancel()
            if listening is not None:
                listening.cancel()
            self.active -= 1

    @staticmethod
    async def _listen(frames: Any, play: Play, script: asyncio.Future[None]) -> None:
        async for frame in frames:
            play.frames.append(frame)
            if frame.HasField("cancel") and not play.is_deaf:
                play.is_cancelled = True
                script.cancel()
        play.is_half_closed = True


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


class Reading:
    """A stream of either client, step by step, while the service runs in this loop."""

    def __init__(self, stream: Any, kind: str) -> None:
        self.stream = stream
        self._is_blocking = kind == "blocking"
        self._events: Any = None

    async def next(self) -> Event | None:
        """The next event; None at the end."""
        if self._events is None:
            self._events = iter(self.stream) if self._is_blocking else aiter(self.stream)
        if self._is_blocking:
            return await asyncio.to_thread(next, self._events, None)
        return await anext(self._events, None)

    async def through(self, sequence: int) -> list[Event]:
        """All events up to `sequence`."""
        events = []
        while not events or events[-1].sequence < sequence:
            event = await self.next()
            assert event is not None
            events.append(event)
        return events

    async def rest(self) -> Heard:
        """Read to the end."""
        heard = Heard()
        try:
            while (event := await self.next()) is not None:
                heard.events.append(event)
            heard.answer = self.stream.answer
        except HeadraceError as error:
            heard.error = error
        return heard

    async def leave(self) -> None:
        """What breaking out of a loop does."""
        if self._is_blocking:
            await asyncio.to_thread(self._events.close)
        else:
            await self._events.aclose()

    async def leave_context(self) -> None:
        """What the end of a `with` block does."""
        if self._is_blocking:
            await asyncio.to_thread(self.stream.__exit__, None, None, None)
        else:
            await self.stream.__aexit__(None, None, None)


class Asker:
    """Reads streams with one kind of client, "aio" or "blocking", in its default form or with "-plain" behind it."""

    def __init__(self, kind: str) -> None:
        self.kind, _, form = kind.partition("-")
        self.interactive = form != "plain"

    @contextlib.asynccontextmanager
    async def client(self, target: str | list[str], **options: Any) -> AsyncIterator[Any]:
        """A client of this kind, for `reading`."""
        options = {"retry": FAST, "interactive": self.interactive, **options}
        if self.kind == "aio":
            async with AsyncClient(target, **options) as client:
                yield client
        else:
            blocking = Client(target, **options)
            try:
                yield blocking
            finally:
                await asyncio.to_thread(blocking.close)

    def reading(self, stream: Any) -> Reading:
        return Reading(stream, self.kind)

    async def wait(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of a client of this kind."""
        if self.kind == "aio":
            return await function(*arguments, **options)
        return await asyncio.to_thread(function, *arguments, **options)

    async def __call__(
        self, target: str | list[str], *, retry: RetryPolicy | None = FAST, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Heard:
        if not options.keys() & {"prompt", "messages", "token_ids"}:
            options["prompt"] = "hi"
        options = {"model": "chat", "timeout_s": timeout_s, **options}
        return await self.read(target, lambda client: client.generate(**options), retry)

    async def resume(
        self, target: str | list[str], *arguments: Any, retry: RetryPolicy | None = FAST, **options: Any
    ) -> Heard:
        return await self.read(target, lambda client: client.resume(*arguments, **options), retry)

    async def read(
        self, target: str | list[str], begin: Callable[[Any], Any], retry: RetryPolicy | None = FAST
    ) -> Heard:
        """Read the stream that `begin` makes of a client to its end."""
        heard = Heard()
        if self.kind == "blocking":
            await asyncio.to_thread(self._blocking, heard, target, retry, begin)
            return heard
        async with AsyncClient(target, retry=retry, interactive=self.interactive) as client:
            try:
                stream = begin(client)
                async for event in stream:
                    heard.events.append(event)
                heard.answer = stream.answer
            except HeadraceError as error:
                heard.error = error
        return heard

    def _blocking(
        self, heard: Heard, target: str | list[str], retry: RetryPolicy | None, begin: Callable[[Any], Any]
    ) -> None:
        with Client(target, retry=retry, interactive=self.interactive) as client:
            try:
                stream = begin(client)
                for event in stream:
                    heard.events.append(event)
                heard.answer = stream.answer
            except HeadraceError as error:
                heard.error = error


class Cut:
    """A wire to the service that can be cut: both ends see the connection reset."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Cut:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        self.writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


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
