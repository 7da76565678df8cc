"""Small deliberate breakages of the real classes, each of which the simulation notices: all of them."""

from __future__ import annotations

from sim import mutations_continuation, mutations_engine, mutations_pauses, mutations_queue, mutations_router
from sim.breakage import MUTATIONS, Mutation

__all__ = [
    "MUTATIONS",
    "Mutation",
    "mutations_continuation",
    "mutations_engine",
    "mutations_pauses",
    "mutations_queue",
    "mutations_router",
]
