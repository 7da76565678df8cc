"""What the Scheduler's ledger keeps: of one attempt, of one run of a worker's engine, and of what it dropped.

The ledger itself, with every rule, is headrace.control.attempts. Sans-io.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.control.deadlines import Budget
from headrace.control.doors import Closed
from headrace.control.errors import Failure, Reason
from headrace.control.load_class import NO_CLASS, LoadClass, load_class, tokens_of_bytes
from headrace.control.priority import Priority

WAITING_MIN = 16
WAITING_PER_SLOT = 2


class Cause(enum.Enum):
    """Why an attempt was told to end before the engine ended it."""

    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    QUEUE_TIMEOUT = "queue_timeout"
    EXECUTION_TIMEOUT = "execution_timeout"
    SLOW_CONSUMER = "slow_consumer"
    DRAINED = "drained"


CAUSE_OF_LIMIT: Mapping[Reason, Cause] = {
    Reason.DEADLINE_EXCEEDED: Cause.DEADLINE_EXCEEDED,
    Reason.QUEUE_TIMEOUT: Cause.QUEUE_TIMEOUT,
    Reason.EXECUTION_TIMEOUT: Cause.EXECUTION_TIMEOUT,
}
"""The cause that goes with a limit of headrace.control.deadlines."""


@dataclass(slots=True)
class Attempt:
    """One attempt that has not ended."""

    token: int
    session: int
    """Number of the Router session that owns it; 0 once that session is gone."""
    replica: str
    incarnation: int
    """The run of the engine that it was given to; what another run says of it does not count."""
    record_version: int
    """Version of the Router's record when it made the attempt; echoed."""
    input_bytes: int
    budget: Budget
    """Its limits, counted from its arrival here."""
    max_tokens: int
    """Tokens it may generate; with the prompt, the KV cells that the engine reserves."""
    credit_limit: int
    """Tokens it may generate until more is granted."""
    tenant: str = ""
    weight: int = 1
    """Its tenant's."""
    priority: Priority = Priority.STANDARD
    load_class: LoadClass = NO_CLASS
    prompt_tokens: int = 0
    """Tokens of its prompt: as estimated, until the engine has counted them."""
    prompt_guess: int = 0
    """Tokens that the bytes of its prompt told; 0: they were known."""
    is_extra: bool = False
    """Whether it is a retry, a hedge or a continuation."""
    handed_at: float | None = None
    """When it was given to the engine; None while it waits in the Scheduler. Monotonic seconds, like every time."""
    admitted_at: float | None = None
    kv_cells: int = 0
    """KV cells that it holds, or needs again while it is preempted; before that, what it is expected to need."""
    payload: Any = None
    """What the carrier needs to hand it over; nothing here looks at it."""
    preempted_last: int = 0
    """Number of the newest preemption that was told; the first one is 1."""
    resumed_last: int = 0
    """Number of the newest preemption whose end was told, which may be before its beginning is."""
    cause: Cause | None = None
    cancel_asked_at: float | None = None
    """When it was first told to end; set together with `cause`."""
    is_unconfirmed: bool = False
    """Whether its cancel was found without an answer once already."""

    @property
    def received_at(self) -> float:
        """When its dispatch arrived."""
        return self.budget.received_at

    @property
    def is_queued(self) -> bool:
        """Whether the engine knows nothing of it yet."""
        return self.handed_at is None

    @property
    def is_staged(self) -> bool:
        """Whether the engine has it and has not begun."""
        return self.handed_at is not None and self.admitted_at is None

    @property
    def is_preempted(self) -> bool:
        """Whether the engine took slot and KV back for a while."""
        return self.preempted_last > self.resumed_last

    @property
    def is_active(self) -> bool:
        """Whether it holds a slot and its KV."""
        return self.admitted_at is not None and not self.is_preempted


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the ledger needs to know of a dispatch."""

    token: int
    session: int
    replica: str
    revision: str
    epoch: int
    input_bytes: int
    max_tokens: int
    remaining_s: float | None = None
    """Time left for the whole request; None: no deadline."""
    queue_s: float | None = None
    """Longest wait for a slot from now on; None: no limit."""
    execution_s: float | None = None
    """Longest run from the engine's admission on; None: no limit."""
    credit_limit: int = 0
    record_version: int = 0
    tenant: str = ""
    weight: int = 1
    """Its tenant's."""
    priority: Priority = Priority.STANDARD
    effort: str = ""
    """Reasoning effort in force."""
    prompt_estimate: int = 0
    """Tokens of the prompt; 0: as its bytes tell."""
    is_prompt_exact: bool = False
    """Whether they are known, since ids were sent."""
    is_extra: bool = False
    """Whether it is a retry, a hedge or a continuation."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as estimated."""
        return self.prompt_estimate or tokens_of_bytes(self.input_bytes)

    @property
    def load_class(self) -> LoadClass:
        """Its class."""
        return load_class(self.revision, self.effort, self.prompt_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True)
class EndedHere:
    """An attempt that ended while the engine knew nothing of it."""

    attempt: Attempt
    failure: Failure | None
    """Why; None: for its cause."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy one worker is."""

    active: int
    waiting: int
    """Attempts without a slot, those included that were preempted and need one again."""
    slots: int
    kv_cells_reserved: int
    kv_cells: int
    queue_wait_s: float = 0.0
    """What a request of middling size that came now would wait; 0 where nothing was measured and a slot is free."""
    waiting_tokens: int = 0
    """KV cells that those who wait in the Scheduler will need."""
    concurrency_limit: int = 0
    """Attempts that the engine is given at a time; at most its slots."""
    admits_from: Priority = Priority.SHEDDABLE
    prefill_tokens_per_s: int = 0
    """0: not known."""
    waiting_max: int = 0
    """Attempts that may wait."""
    room: int = 0
    """How many more may come before as many wait."""
    closed: tuple[Closed, ...] = ()
    """To whom it is closed."""


def waiting_max(slots: int) -> int:
    """Attempts that may wait for a worker with so many slots."""
    return max(WAITING_MIN, WAITING_PER_SLOT * slots)


@dataclass(slots=True)
class WorkerBook:
    """What the ledger keeps of one run of a worker's engine."""

    replica: str
    revision: str
    epochs: tuple[int, ...]
    """Fencing tokens under which this run of the engine is known: one, or two after a lost lease."""
    slots: int
    kv_cells: int
    context_tokens: int
    incarnation: int = 0
    """Number of this run; differs for each run of any worker of this process."""
    draining: bool = False
    waiting: int = 0
    """Attempts that the engine has not begun with, whether it has them or not."""
    staged: int = 0
    """Of them, those that it has."""
    staged_cells: int = 0
    """KV cells that those will need."""
    shorts: int = 0
    """Attempts of short load classes that the engine has."""
    active: int = 0
    """Attempts that hold a slot."""
    preempted: int = 0
    """Attempts whose slot and KV the engine took back for a while."""
    kv_cells_reserved: int = 0
    attempts: dict[int, Attempt] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    """Attempts here of each session."""
    concurrency_limit: int = 0
    """Attempts that the engine may be given at a time, set by the policy of overload; 0: its slots are the limit."""
    admits_from: Priority = Priority.SHEDDABLE
    """Dispatches below this priority are refused, set by the policy of overload; the lowest one: none is."""

    def session_of(self, token: int) -> int:
        """The session that an attempt's output goes to; 0: nobody. The hot path's only question."""
        attempt = self.attempts.get(token)
        return 0 if attempt is None else attempt.session


@dataclass(slots=True)
class AttemptCounts:
    """Things that are counted; all but the last five are dropped and have no other effect."""

    duplicates: int = 0
    """Dispatches that repeat a token."""
    duplicate_cancels: int = 0
    """Cancels of attempts that were told to end before; the first cause stands."""
    late: int = 0
    """Engine events, credits and cancels of attempts that are over or were never known."""
    stale_incarnation: int = 0
    """What another run of an engine said than the one that the attempt was given to."""
    stale_credits: int = 0
    """Credits that are not higher than the one before."""
    refused: dict[tuple[str, str], int] = field(default_factory=dict)
    """Attempts refused or shed here, by reason and by the stage that the refusal names."""
    preemptions: int = 0
    resumptions: int = 0
    cancels_asked: int = 0
    cancels_confirmed: int = 0
    """Of them, those whose end the engine confirmed; the others went with their worker."""
