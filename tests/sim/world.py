"""All parts in one virtual clock, and the faults that befall them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.control.holdings import ReleaseError, ResourceLedger
from headrace.engine.ledger import LedgerError
from sim.client import Client
from sim.laws import Laws
from sim.link import Link
from sim.pauses import Pauses
from sim.router import Router
from sim.scenario import Fault, Scenario
from sim.scheduler import Scheduler
from sim.timeline import EVENTS_MAX, Timeline
from sim.violation import Violation


class World:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.counts: Counter[str] = Counter()
        self.attempts = 0
        """Also the token of the newest one."""
        self.time = Timeline(scenario.seed)
        self.laws = Laws(self)
        self.pauses = Pauses(self)
        self.resources = ResourceLedger()
        self.scheduler = Scheduler(self)
        self.link = Link(self)
        self.router = Router(self)
        self._epochs: dict[str, int] = {}
        self.link.open()
        for number in range(scenario.workers):
            self._start_worker(_replica(number), learn_ms=0)
        self.clients = [Client(self, number, ask) for number, ask in enumerate(scenario.asks)]
        for fault in scenario.faults:
            self.time.later(fault.at_ms, self._befall, fault)

    def run(self, watch: Callable[[World], None] | None = None) -> None:
        """Until nothing is left to happen.

        Raises:
            Violation: a law is broken.
        """
        try:
            while self.time.step():
                if watch is not None:
                    watch(self)
                self.laws.check()
                self.pauses.check()
                if self.time.events > EVENTS_MAX:
                    raise Violation("liveness", f"still busy after {EVENTS_MAX} events")
            self.laws.finish()
        except Violation:
            raise
        except ReleaseError as error:
            raise Violation("released_once", str(error)) from error
        except LedgerError as error:
            raise Violation("engine_ledger", str(error)) from error
        except AssertionError as error:
            raise Violation("kv" if str(error).startswith("KV") else "assertion", str(error)) from error
        except Exception as error:
            raise Violation("crash", f"{type(error).__name__}: {error}") from error

    def repeat(self, what: str, call: Callable[..., Any], *args: Any) -> None:
        """Perhaps the same again, later."""
        rng = self.time.rng
        if self.scenario.repeat_percent and rng.random() * 100 < self.scenario.repeat_percent:
            self.counts[f"repeated_{what}"] += 1
            self.time.later(rng.choice([0, 5, 10, 20, 50, 300, 1_500]), call, *args)

    # Faults

    def _start_worker(self, replica: str, learn_ms: int) -> None:
        epoch = self._epochs[replica] = self._epochs.get(replica, 0) + 1
        self.counts["restart"] += epoch > 1
        self.scheduler.start_worker(replica, epoch)
        if learn_ms:
            self.time.later(learn_ms, self._learn, replica, epoch)
        else:
            self._learn(replica, epoch)

    def _learn(self, replica: str, epoch: int) -> None:
        self.router.known[replica] = epoch

    def _befall(self, fault: Fault) -> None:
        replica = _replica(fault.target)
        engine = self.scheduler.engines.get(replica)
        if fault.kind in ("link_loss", "blink"):
            self.counts[fault.kind] += self.link.is_up
            self.link.lose(is_back=fault.kind == "blink")
            self.time.later(fault.lasts_ms, self._reopen_link)
        elif fault.kind == "drain_router":
            for session in self.router.sessions:
                if not session.is_closed:
                    self.counts["drain_router"] += session.machine.record.finish is None
                    session.drain()
        elif fault.kind == "drain_scheduler":
            self.counts["drain_scheduler"] += 1
            self.scheduler.ledger.draining = True
            self.time.later(fault.lasts_ms, self._end_drain)
        elif engine is None or engine.is_dead or self.scheduler.ledger.workers[replica].draining:
            return
        elif fault.kind == "drain":
            self.counts["drain"] += 1
            self.scheduler.ledger.drain_worker(replica)
            self.time.later(self.time.rng.randrange(150), self.router.known.pop, replica, None)
            self.time.later(fault.lasts_ms, self.scheduler.cut_worker, replica)
            self.time.later(fault.lasts_ms + self.time.rng.choice([0, 100]), self._stop_drained, replica)
        else:
            self.counts[fault.kind] += 1
            engine.kill()
            learn_ms = 300 if fault.kind == "restart_late" else self.time.rng.randrange(20)
            found_ms = 2_600 if fault.kind == "hang" else self.time.rng.choice([0, 1, 3, 100])
            self.time.later(found_ms, self._find_dead, replica, fault.lasts_ms, learn_ms)

    def _find_dead(self, replica: str, lasts_ms: int, learn_ms: int) -> None:
        self.scheduler.close_worker(replica, drained=False)
        self.time.later(lasts_ms, self._start_worker, replica, learn_ms)

    def _stop_drained(self, replica: str) -> None:
        self.scheduler.engines[replica].kill()
        self.scheduler.close_worker(replica, drained=True)
        self.time.later(200, self._start_worker, replica, 10)

    def _reopen_link(self) -> None:
        if not self.link.is_up:
            self.link.open()

    def _end_drain(self) -> None:
        self.scheduler.ledger.draining = False


def _replica(number: int) -> str:
    return f"replicas/{number}"
