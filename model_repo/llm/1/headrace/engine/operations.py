"""What the loop's inbox holds: operations that have been read and checked."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.owner import Sink
from headrace.engine.request import Rejected
from headrace.engine.sequence import Prepared


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A new owner; the one before is superseded. Or, with `goes_on`, the same owner's next stream."""

    sink: Sink
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """New sequences. With `sink`, they are told there alone (`run`)."""

    entries: tuple[Prepared | Rejected, ...]
    sink: Sink | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """New credit limits by sequence."""

    limits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Sequences to end, and the reason to say."""

    seqs: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Enumerate:
    """Tell the owner which of its sequences live, in the order of everything else on its stream."""


Operation = OpenStream | Submit | Grant | Cancel | Enumerate
