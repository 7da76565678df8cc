"""Books and dispatches for tests of the Scheduler's ledger."""

from headrace.control.attempt_book import Dispatched, WorkerBook

REVISION = "models/m/revisions/0123456789ab"
RUN = 31
"""Incarnation of the engine's run, where a test has only one."""


def book(replica: str = "replicas/a", epoch: int = 7, slots: int = 2, incarnation: int = RUN) -> WorkerBook:
    return WorkerBook(
        replica, REVISION, (epoch,), slots=slots, kv_cells=1000, context_tokens=100, incarnation=incarnation
    )


def wanted(token: int, **changes: object) -> Dispatched:
    fields: dict[str, object] = {
        "token": token,
        "session": 1,
        "replica": "replicas/a",
        "revision": REVISION,
        "epoch": 7,
        "input_bytes": 10,
        "max_tokens": 20,
        "remaining_s": None,
    }
    return Dispatched(**(fields | changes))  # type: ignore[arg-type]
