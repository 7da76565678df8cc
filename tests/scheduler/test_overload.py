"""Control of overload in the Scheduler: what reports and metrics say, and what engines are told."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.control.attempt_book import waiting_max
from headrace.control.resources import Engine, Execution, Revision
from headrace.engine.config import parse_config
from headrace.engine.contract import StepBatch
from headrace.scheduler import relay as relay_module
from headrace.scheduler.engine_config import engine_config
from headrace.scheduler.settings import SchedulerSettings
from support.relaying import REVISION, Bench
from support.scripted_engine import admitted

SYNTHETIC = Revision("m", "", "", Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256))


@pytest.mark.parametrize("over_commit", [1.0, 2.5])
def test_an_engine_is_told_how_far_its_cells_are_over_committed(over_commit):
    document = engine_config(SYNTHETIC, None, threads=1, incarnation="i", kv_over_commit=over_commit)
    assert parse_config(document).kv_over_commit == over_commit


def test_settings_become_those_of_the_control():
    made = SchedulerSettings(step_target_ms=80, queue_age_target_s=3).overload_settings()
    assert (made.step_target_s, made.queue_age_target_s) == (0.08, 3)
    with pytest.raises(ValidationError):
        SchedulerSettings(step_tolerance=1.0)


async def test_a_worker_under_pressure_says_whom_it_takes():
    bench = Bench()
    slots = bench.relay.ledger.workers["replicas/a"].slots
    for token in range(1, slots + waiting_max(slots) + 1):
        bench.dispatch(token)
        if token <= slots:
            bench.tell(admitted(token))
    (load,) = bench.relay.load_report().replicas
    assert (load.waiting, load.waiting_max) == (waiting_max(slots), waiting_max(slots))
    assert load.admits_from == inference_pb2.PRIORITY_CRITICAL, "its queue is full"


async def test_slow_steps_lower_the_limit_that_is_reported(monkeypatch):
    bench = Bench()
    worker = bench.relay.overload.workers["replicas/a"]
    slots = bench.relay.ledger.workers["replicas/a"].slots
    for token in range(1, slots + 1):
        bench.dispatch(token)
        bench.tell(admitted(token))
    now = [1000.0]
    monkeypatch.setattr(relay_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ended_ns = 0
    for step_s in [0.02] * 1000 + [2.0] * 30:
        now[0] += step_s
        ended_ns += int(step_s * 1e9)
        batch = StepBatch(
            number=1, steps=1, ended_ns=ended_ns, seqs=[1], token_counts=[1], token_ids=[1], text_lengths=[0]
        )
        bench.relay.on_batch("replicas/a", bench.run, batch)
    (load,) = bench.relay.load_report().replicas
    assert load.concurrency_limit == worker.concurrency.limit < slots
    assert bench.metric("slow_windows_total", revision=REVISION) >= 1


async def test_a_worker_that_is_gone_has_no_control():
    bench = Bench()
    bench.relay.close_engine("replicas/a", drained=False)
    assert not bench.relay.overload.workers
