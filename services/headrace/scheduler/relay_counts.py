"""What the relay counts: plain integers, read when metrics are scraped."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.priority import Priority
from headrace.scheduler import codec
from headrace.scheduler.durations import Durations


@dataclass(slots=True)
class RelayCounts:
    """Cheap integers, read when metrics are scraped."""

    messages: int = 0
    steps: int = 0
    tokens: int = 0
    frames_in: int = 0
    frames_out: int = 0
    wakeups: int = 0
    overflows: int = 0
    """Sessions ended because more output waited for them than may."""
    dropped_tokens: int = 0
    """Output that had no owner any more."""
    hung: int = 0
    """Engines given up because they did not confirm a cancel."""
    orphans: int = 0
    """Sequences that ran in an engine for no attempt, cancelled."""
    unknown: int = 0
    """Attempts whose engine did not know them, ended."""
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Ended attempts by finish reason and by the reason of the error, "NONE" where there is none."""
    cancel_to_confirmed: Durations = field(default_factory=Durations)
    queue_wait: dict[Priority, Durations] = field(default_factory=lambda: {p: Durations() for p in Priority})
    """From a dispatch's arrival to the engine's admission."""

    def ended(self, message: pb.Ended) -> None:
        """Count an end."""
        name = codec.finish_name(message.reason), codec.reason_name(message)
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
