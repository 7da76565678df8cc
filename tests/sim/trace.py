"""A run, told step by step: what was called, and what changed in requests and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.control.holdings import Resource
from headrace.engine.contract import StepBatch
from sim.timeline import Pipe
from sim.world import World


class Tracer:
    """Give `watch` to World.run. Steps that change nothing and carry nothing are left out."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._before: dict[str, str] = {}

    def watch(self, world: World) -> None:
        """Tell the newest step."""
        now = self._state(world)
        changes = [f"{name}: {text}" for name, text in now.items() if self._before.get(name) != text]
        self._before = now
        call, args = world.time.newest or (self.watch, ())
        owner = getattr(call, "__self__", None)
        if isinstance(owner, Pipe):
            carried = ", ".join(_short(message) for message in owner.newest)
            deliver = getattr(owner._deliver, "__qualname__", "?").split(".<locals>")[0]
            what = f"-> {deliver}: {carried}" if carried else ""
        else:
            what = f"{call.__qualname__}({', '.join(_short(arg) for arg in args)})"
        if changes or (what and not what.startswith(("Session._tick", "Engine._turn", "Client._read"))):
            self._say(f"{world.time.now:8.3f}  {what}")
            for change in changes:
                self._say(f"              {change}")

    def _state(self, world: World) -> dict[str, str]:
        state = {}
        for session in world.router.sessions:
            machine, window = session.machine, session.machine.window
            record = machine.record
            held = ",".join(r.name for r in Resource if r in machine.holdings)
            finish, reason = record.finish, record.reason
            state[f"request {session.number}"] = (
                f"{record.phase.name} v{record.version} {finish.name if finish else ''} {reason.name if reason else ''}"
                f" attempt {record.attempt}{' runs' if machine.is_running else ''};"
                f" told {machine.sequence}, {machine.pending} wait, {machine.dropped} dropped;"
                f" produced {window.produced} granted {window.granted} taken {window.taken}"
                f" sent {window.sent} acknowledged {window.acknowledged} {window.reader.name};"
                f" held {held}; late {machine.late}"
            )
        for replica, engine in world.scheduler.engines.items():
            sequences = ", ".join(
                f"{s.id} {s.phase.name} {s.generated}/{s.limit}" for s in engine.loop._sequences.values()
            )
            state[replica] = f"epoch {engine.epoch}{' dead' if engine.is_dead else ''} [{sequences}]"
        return state


def _short(value: Any) -> str:
    if isinstance(value, StepBatch):
        parts = " ".join(f"{part.seq}:{len(part.token_ids)}" for part in value.parts())
        events = " ".join(f"{event['type']}:{event.get('seq', '')}" for event in value.events)
        return f"<{parts} {events}>"
    text = str(value)
    return text if len(text) < 160 and " object at 0x" not in text else type(value).__name__
