"""One fault, from before it to the verdict.

A fault is an async generator over the rig. It breaks something, proves meanwhile that it is broken, heals it, and
yields `HEALED`; once everyone has converged it goes on, and yields further proofs. A proof is a sentence and whether
it holds: one that does not makes the run invalid, for a fault that did not happen shows nothing.

The laws: no request fails; versions never go back at any reader; every change that was acknowledged is in the final
snapshot; every reader ends with what the store holds; no event of the store is lost or applied twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from faults.rig import Rig
from support.etcd import eventually

Proof = tuple[str, bool]
HEALED: Proof = ("healed", True)
Breaking = Callable[[Rig], AsyncIterator[Proof]]
CALM_S = 1.0
"""Before a fault begins, and after it was noticed to be over, seconds."""


@dataclass
class Outcome:
    """What one fault did."""

    fault: str
    seconds: float = 0.0
    """From breaking it to healing it."""
    in_flight: int = 0
    """Requests that ran when it began."""
    completed: int = 0
    """From then until everyone had converged."""
    failures: list[str] = field(default_factory=list)
    versions: int = 0
    """Seen by all readers together."""
    converged_s: float = 0.0
    """From the heal until a change made after it had reached everyone."""
    promised: int = 0
    """Writes to etcd that were acknowledged, each an event that must arrive."""
    lost: int = 0
    relisted: str = ""
    proofs: list[Proof] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def happened(self) -> bool:
        """Whether the fault was real."""
        return bool(self.proofs) and all(holds for _, holds in self.proofs)

    @property
    def verdict(self) -> str:
        """holds, BROKEN, or INVALID."""
        if not self.happened:
            return "INVALID"
        return "BROKEN" if self.broken else "holds"

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self), "happened": self.happened, "verdict": self.verdict}


async def examine(rig: Rig, name: str, breaking: Breaking) -> Outcome:
    """Let `breaking` happen under load, and judge."""
    outcome = Outcome(name)
    rig.twin.broken.clear()
    async with rig.churn, rig.writer:
        await asyncio.sleep(CALM_S)
        marks = [versions.seen for versions in _versions(rig)]
        rig.ages.clear()
        relists = rig.twin.watch.state.relists
        completed, failures = (rig.load.completed, len(rig.load.failures)) if rig.load else (0, 0)
        outcome.in_flight = rig.load.in_flight if rig.load else 0
        began = time.monotonic()
        steps = breaking(rig)
        async for proof in steps:
            if proof is HEALED:
                break
            outcome.proofs.append(proof)
        outcome.seconds = time.monotonic() - began
        outcome.converged_s, final, missing = await rig.converged()
        rig.is_between_stores = False
        outcome.broken += missing
        if rig.weight(final) > rig.churn.tried:
            outcome.broken.append("the snapshot shows a change that nobody made")
        async for proof in steps:
            outcome.proofs.append(proof)
        await rig.writer.stop()
        try:
            await eventually(rig.twin_is_equal, 30)
        except AssertionError:
            outcome.broken.append("the twin never equalled the store")
    outcome.versions = sum(v.seen for v in _versions(rig)) - sum(marks)
    outcome.promised = len(rig.writer.promised)
    outcome.lost = len(rig.twin.lost(rig.writer.promised))
    outcome.relisted = rig.twin.watch.state.last_relist if rig.twin.watch.state.relists > relists else ""
    rig.writer.promised.clear()
    if outcome.lost:
        outcome.broken.append(f"{outcome.lost} events were lost")
    outcome.broken += rig.twin.broken
    for versions in _versions(rig):
        outcome.broken += versions.broken
        versions.broken.clear()
    if rig.load:
        outcome.completed = rig.load.completed - completed
        outcome.failures = rig.load.failures[failures:]
        outcome.broken += [f"a request failed: {failure}" for failure in outcome.failures]
        outcome.proofs.append(("requests ran", outcome.in_flight > 0 and outcome.completed > 0))
    return outcome


def _versions(rig: Rig) -> list[Any]:
    return [*(reader.versions for reader in rig.readers), *rig.reported.values()]
