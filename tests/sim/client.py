"""Clients: calls with a transport of bounded size, readers of any speed, and what they do at odd moments."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from headrace.control.credit import Reader
from sim.router import Event, Session
from sim.scenario import Act, Ask
from sim.timeline import Pipe

if TYPE_CHECKING:
    from sim.world import World


class Call:
    """One call: the Router's writer on one side, the client's reader on the other."""

    def __init__(self, client: Client, kind: Reader) -> None:
        self.client = client
        self.world = client.world
        self.kind = kind
        self.session: Session | None = None
        self.missed: deque[Event] = deque()
        self.is_open = True
        """At the Router."""
        self.status: str | None = None
        """At the Router; the client sees it behind all events."""
        self.buffer: deque[Event] = deque()
        """Taken by the transport, not read yet."""
        self.acknowledged = 0
        self.last = 0
        """Sequence of the newest event that the client read here, or has said to have."""
        self.frames = Pipe(self.world.time, self.world.scenario.delay_ms, self._hear)
        self._blocked: Event | None = None
        self._is_pumping = False

    # The Router's side

    def wake(self) -> None:
        """There may be something to take."""
        if not self._is_pumping and self.is_open and self._blocked is None:
            self._is_pumping = True
            self.world.time.later(0, self._pump)

    def break_off(self, why: str) -> None:
        """End the call, even if a write is held up."""
        self._end(why)

    def room(self) -> None:
        """The client has read something."""
        if self._blocked is not None and self.is_open:
            event, self._blocked = self._blocked, None
            self._accept(event)
            self.wake()

    def _pump(self) -> None:
        self._is_pumping = False
        session = self.session
        if not self.is_open or self._blocked is not None or session is None:
            return
        while True:
            event = self.missed.popleft() if self.missed else session.take()
            if event is None:
                break
            if len(self.buffer) >= self.client.ask.transport_events:
                self._blocked = event
                session.machine.writing_since = self.world.time.now
                return
            self._accept(event)
        if session.machine.is_told:
            self._end("told")

    def _accept(self, event: Event) -> None:
        assert self.session is not None
        self.buffer.append(event)
        self.session.wrote(event)
        self.client.notify()

    def _end(self, status: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.status = status
        self._blocked = None
        if self.session is not None:
            self.session.detach(self)
        self.client.notify()

    def _hear(self, frames: list[tuple[str, int]]) -> None:
        for kind, value in frames:
            if kind == "gone":
                self._end("disconnected")
            elif not self.is_open or self.session is None:
                return
            elif kind == "acknowledge":
                self.session.acknowledge(value)
            else:
                self.session.cancel()


class Client:
    """One request's caller."""

    def __init__(self, world: World, number: int, ask: Ask) -> None:
        self.world = world
        self.number = number
        self.ask = ask
        self.session: Session | None = None
        self.call: Call | None = None
        self.last = 0
        """Sequence of the newest event that was read."""
        self.datas: dict[int, bytes] = {}
        self.outcome: str | None = None
        self._is_reading = False
        self._stalled_until = 0.0
        self._unconfirmed = 0
        """Tokens read and not acknowledged."""
        world.time.later(ask.at_ms, self._start)

    def _start(self) -> None:
        self.call = Call(self, Reader.EXPLICIT if self.ask.is_interactive else Reader.IMPLICIT)
        self.world.time.later(self._delay_ms(), self._arrive, self.call)
        for act in self.ask.acts:
            self.world.time.later(act.at_ms, self._act, act)

    def _arrive(self, call: Call) -> None:
        if not call.is_open:
            return  # its caller has left before it got here
        self.session = self.world.router.ask(call, self.ask, self.number)
        if self.session is None:
            call.break_off("nobody can take it")
            return
        call.session = self.session
        call.wake()

    def _delay_ms(self) -> int:
        return self.world.time.rng.randrange(self.world.scenario.delay_ms + 1)

    # Reading

    def notify(self) -> None:
        """Something may have come."""
        if not self._is_reading:
            self._is_reading = True
            self.world.time.later(self._delay_ms(), self._read)

    def _read(self) -> None:
        self._is_reading = False
        call, now = self.call, self.world.time.now
        if call is None:
            return
        if now < self._stalled_until - 1e-9:
            self._is_reading = True
            self.world.time.later(max(1, round((self._stalled_until - now) * 1_000)), self._read)
            return
        if call.buffer:
            event = call.buffer.popleft()
            self._consume(call, event)
            call.room()
            self._is_reading = True
            self.world.time.later(self.world.time.rng.randrange(self.ask.read_ms + 1), self._read)
        elif call.status is not None:
            self._finish(call, call.status)

    def _consume(self, call: Call, event: Event) -> None:
        self.world.laws.on_read(self, call, event)
        self.last = call.last = event.sequence
        _, kind, ids, *_ = json.loads(event.data)
        if call.kind is not Reader.EXPLICIT:
            return
        self._unconfirmed += len(ids)
        if self._unconfirmed >= self.ask.window // 2 or kind == "terminal":
            self._acknowledge(call)
        elif self._unconfirmed:
            self.world.time.later(30, self._acknowledge, call)

    def _acknowledge(self, call: Call) -> None:
        if call is not self.call or call.acknowledged >= call.last:
            return
        self._unconfirmed = 0
        call.acknowledged = call.last
        call.frames.send(("acknowledge", call.last))

    def _finish(self, call: Call, status: str) -> None:
        self.call = None
        self.outcome = status
        self.world.laws.on_status(self, call, status)

    # What it does besides

    def _act(self, act: Act) -> None:
        call, counts = self.call, self.world.counts
        if act.kind == "stall":
            self._stalled_until = max(self._stalled_until, self.world.time.now + act.value / 1_000)
        elif act.kind == "cancel_request" or (act.kind == "cancel_frame" and not self.ask.is_interactive):
            if self.session is not None and not self.session.is_closed:
                counts["cancel_request"] += self.session.machine.record.finish is None
                self.session.cancel()
        elif act.kind == "resume":
            self._resume(act)
        elif call is None:
            return
        elif act.kind == "cancel_frame":
            counts["cancel_frame"] += 1
            call.frames.send(("cancel", 0))
        elif act.kind == "disconnect":
            counts["disconnect"] += 1
            self._leave(call)
        elif call.kind is Reader.EXPLICIT and call.acknowledged:
            counts[act.kind] += 1
            back = 0 if act.kind == "repeat_ack" else self.world.time.rng.randrange(call.acknowledged)
            call.frames.send(("acknowledge", call.acknowledged - back))

    def _leave(self, call: Call) -> None:
        call.frames.send(("gone", 0))
        self.call = None
        self.outcome = "left"

    def _resume(self, act: Act) -> None:
        """With a call that may still be there, from the newest event that was read, an older one, or none such."""
        if self.session is None:
            return
        after = self.last + 5 if act.value < 0 else max(0, self.last - act.value)
        kind = self.world.time.rng.choice([Reader.EXPLICIT, Reader.IMPLICIT])
        self.call = Call(self, kind)
        self.outcome = None
        self.world.time.later(self._delay_ms(), self._arrive_again, self.call, after)

    def _arrive_again(self, call: Call, after: int) -> None:
        assert self.session is not None
        if not call.is_open:
            return
        missed = self.world.router.resume(call, self.session, after)
        if isinstance(missed, str):
            self.world.counts[f"resume_{missed.replace(' ', '_')}"] += 1
            call.break_off(missed)
            return
        self.world.counts["resume"] += 1
        self.world.counts["resume_repeats"] += after < self.last
        self.world.laws.on_resumed(self, after)
        call.session = self.session
        call.missed = missed
        call.acknowledged = call.last = after
        self._unconfirmed = 0
        call.wake()
