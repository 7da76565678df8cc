"""One request's machine with a reader that takes whatever is next at once, for tests of the core."""

from __future__ import annotations

from headrace.control.backoff import Retries
from headrace.control.credit import CreditWindow
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.holdings import ResourceLedger
from headrace.control.lifecycle import Finish
from headrace.control.request import AttemptEnd, RequestMachine, Step, Terms

STOP = AttemptEnd(Finish.STOP)
LOST = AttemptEnd(Finish.FAILED, Reason.WORKER_LOST_BEFORE_OUTPUT, is_retryable=True)
BUDGET = Budget(received_at=0.0, deadline_at=100.0, queue_s=20.0, execution_s=30.0)


class Told:
    """A machine, and a reader that takes whatever is next at once."""

    def __init__(
        self,
        *,
        window: int = 8,
        resume_s: float | None = None,
        slow_s: float = 10.0,
        budget: Budget = BUDGET,
        retries: Retries | None = None,
        known_max: int = 0,
    ) -> None:
        self.ledger = ResourceLedger()
        terms = Terms(attempts_max=3, slow_consumer_s=slow_s, resume_s=resume_s, known_max=known_max)
        self.machine = RequestMachine(budget, CreditWindow(window), terms, self.ledger, retries)
        self.steps: list[Step] = []
        self.sequences: list[int] = []
        self.attempt = 0

    def dispatch(self) -> int:
        self.attempt += 1
        return self.machine.dispatch(self.attempt, f"replicas/{self.attempt}")

    def admitted(self, now: float = 1.0, **changes: int) -> bool:
        return self.machine.admitted(self.attempt, self.machine.record.attempt_version, now, **changes)

    def output(self, tokens: int, now: float = 2.0) -> bool:
        return self.machine.output(self.attempt, tokens, now)

    def ended(self, end: AttemptEnd, now: float = 3.0) -> bool:
        return self.machine.ended(self.attempt, self.machine.record.attempt_version, end, now)

    def read(self, now: float) -> Step:
        """Take what there is; returns what stopped it."""
        machine = self.machine
        while (step := machine.next(now)) not in (Step.WAIT, Step.RETRY, Step.OVER):
            tokens = machine.pending if step is Step.DELTA else 0
            self.steps.append(step)
            sequence = machine.take(step)
            if step is not Step.REFUSED:
                self.sequences.append(sequence)
                machine.write(tokens, sequence)
        return step
