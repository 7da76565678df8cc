"""A ledger with one worker, for tests of what waits: keeps what was handed over and what ended in the queue."""

import pytest

from headrace.control.attempts import AttemptLedger
from headrace.control.errors import Failure
from headrace.control.service_times import Served
from headrace.control.worker_queue import QueueSettings
from support.attempts import RUN, book, wanted

SERVED = Served(prompt_tokens=10, prefill_s=0.5, token_s=0.1, output_tokens=20, hold_s=2.0)


class Bench:
    """A ledger with one worker: 2 slots, 1000 KV cells, a context of 100 tokens."""

    def __init__(self, slots=2, **settings):
        self.ledger = AttemptLedger(QueueSettings(**settings))
        self.ledger.open_worker(book(slots=slots))
        self.book = self.ledger.workers["replicas/a"]
        self.queue = self.ledger.queues["replicas/a"]
        self.handed = []
        self.ended = {}
        self.now = 0.0

    def dispatch(self, *tokens, **fields):
        for token in tokens:
            self.ledger.dispatch(wanted(token, **fields), self.now)
            self._take()
        return self.handed

    def refused(self, token, **fields):
        with pytest.raises(Failure) as refused:
            self.dispatch(token, **fields)
        return refused.value

    def begin(self, *tokens, prompt=5):
        for token in tokens:
            assert self.ledger.admit(token, RUN, prompt, self.now) is not None
        self.advance()

    def finish(self, *tokens, served=None):
        for token in tokens:
            attempt = self.ledger.finish(token, RUN)
            if served is not None:
                self.ledger.measure(attempt, served, self.now)
        return self.advance()

    def advance(self, seconds=0.0):
        self.now += seconds
        self.ledger.advance(self.now)
        self._take()
        return self.handed

    def learn(self, count=8, served=SERVED):
        """Let the worker have served so many of the usual ones."""
        for n in range(10_000, 10_000 + count):
            self.dispatch(n)
            self.begin(n)
            self.finish(n, served=served)
        self.handed.clear()

    def _take(self):
        self.handed += [a.token for a in self.ledger.take_ready()]
        for ended in self.ledger.take_ended():
            assert ended.attempt.token not in self.ended
            self.ended[ended.attempt.token] = ended.failure or ended.attempt.cause
