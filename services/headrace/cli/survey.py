"""What a stack says of itself, gathered from the Registry and from each service, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.registry.v1 import registry_service_pb2 as registry_pb
from headrace.api.registry.v1 import resources_pb2, routing_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from headrace.api.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from headrace.cli.registration import CALL_S, Admin
from headrace.rpc.channels import CLIENT_OPTIONS

_PROBE_S = 2.0
_PROBES_AT_A_TIME = 16
_READY = resources_pb2.Replica.STATE_READY


@dataclass(frozen=True, slots=True)
class Report:
    """One look at the stack."""

    snapshot: routing_pb2.RoutingSnapshot
    services: list[resources_pb2.ServiceRecord]
    states: dict[str, str]
    """Health of each service, by name."""
    workers: dict[str, scheduler_pb.Worker]
    """The Schedulers' own view of their replicas, by replica."""
    problems: list[str] = field(default_factory=list)
    is_settling: bool = False
    """Whether a service has not taken over the newest snapshot yet."""

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "snapshot": {
                "version": self.snapshot.version,
                "digest": self.snapshot.digest,
                "incarnation": self.snapshot.incarnation,
                "age": _age(self.snapshot),
            },
            "services": [
                {
                    "name": record.name,
                    "endpoint": record.endpoint,
                    "state": self.states.get(record.name, "unknown"),
                    "snapshot": record.snapshot_version,
                    "refusal": record.snapshot_refusal,
                    "metrics": record.metrics_endpoint,
                    "version": record.version,
                }
                for record in self.services
            ],
            "replicas": [self._replica(replica) for replica in self.snapshot.replicas],
            "aliases": [
                {"name": alias.name, "targets": list(_targets(alias))} for alias in self.snapshot.aliases
            ],
            "revisions": [
                {
                    "name": revision.name,
                    "engine": _word(resources_pb2.Execution.Engine.Name(revision.execution.engine), "ENGINE_"),
                    "context": revision.execution.context_tokens,
                    "slots": revision.execution.slots,
                    "artifact": revision.artifact,
                }
                for revision in self.snapshot.revisions
            ],
        }  # fmt: skip

    def _replica(self, replica: resources_pb2.Replica) -> dict[str, Any]:
        worker = self.workers.get(replica.name)
        return {
            "name": replica.name,
            "revision": replica.revision,
            "state": _word(resources_pb2.Replica.State.Name(replica.state), "STATE_"),
            "detail": replica.detail,
            "scheduler": replica.scheduler,
            "epoch": replica.epoch,
            "slots": replica.slots,
            "kv_cells": replica.kv_cells,
            "restarts": worker.restarts if worker else None,
            "pid": worker.pid if worker else None,
            "worker": _word(scheduler_pb.Worker.State.Name(worker.state), "STATE_") if worker else "unknown",
            "health": _signals(worker),
            "crash_loop": worker.crash_loop if worker else None,
            "memory_mib": worker.memory_bytes >> 20 if worker else None,
        }


def survey(registry: str) -> Report:
    """Look at the stack of the Registry at host:port.

    Raises:
        Problem: the Registry does not answer.
    """
    with Admin(registry) as admin:
        snapshot = admin.snapshot().snapshot
        with admin.errors():
            listed = admin.stub.ListServices(registry_pb.ListServicesRequest(), timeout=CALL_S)
    with ThreadPoolExecutor(_PROBES_AT_A_TIME) as pool:
        states = dict(zip([s.name for s in listed.services], pool.map(_health, listed.services), strict=True))
        schedulers = [record for record in listed.services if record.name.startswith("schedulers/")]
        told = [state for state in pool.map(_scheduler, schedulers) if state is not None]
    behind = [s.name for s in listed.services if s.snapshot_version != snapshot.version]
    return Report(
        snapshot,
        list(listed.services),
        states,
        {worker.replica: worker for state in told for worker in state.workers},
        [*_problems(snapshot, listed, states), *_lease_problems(told)],
        is_settling=bool(behind),
    )


def _problems(
    snapshot: routing_pb2.RoutingSnapshot, listed: registry_pb.ListServicesResponse, states: dict[str, str]
) -> Iterable[str]:
    names = [record.name for record in listed.services]
    for collection, word in (("routers/", "Router"), ("schedulers/", "Scheduler")):
        if not any(name.startswith(collection) for name in names):
            yield f"no {word} is registered"
    for record in listed.services:
        state = states[record.name]
        if state != "serving":
            yield f"{record.name} at {record.endpoint}: {state}"
        if record.snapshot_refusal:
            yield f"{record.name} refused a snapshot: {record.snapshot_refusal}"
        elif record.snapshot_version != snapshot.version:
            yield f"{record.name} runs snapshot {record.snapshot_version}, {snapshot.version} is published"
    ready = {replica.revision for replica in snapshot.replicas if replica.state == _READY}
    for alias in snapshot.aliases:
        for target in alias.targets:
            if target.revision not in ready:
                yield f"{alias.name}: no replica is ready for {target.revision}"
    for replica in snapshot.replicas:
        if replica.state == resources_pb2.Replica.STATE_FAILED:
            yield f"{replica.name} failed: {replica.detail}"


def _health(record: resources_pb2.ServiceRecord) -> str:
    try:
        with grpc.insecure_channel(record.endpoint, options=CLIENT_OPTIONS) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_S)
    except grpc.RpcError:
        return "does not answer"
    return "serving" if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


def _lease_problems(told: Iterable[scheduler_pb.GetStateResponse]) -> Iterable[str]:
    for state in told:
        if state.lease not in (
            scheduler_pb.GetStateResponse.LEASE_UNSPECIFIED,
            scheduler_pb.GetStateResponse.LEASE_HELD,
        ):
            word = _word(scheduler_pb.GetStateResponse.Lease.Name(state.lease), "LEASE_")
            yield f"{state.scheduler}: lease {word}, renewed {state.lease_age.ToTimedelta().total_seconds():.0f} s ago"


def _signals(worker: scheduler_pb.Worker | None) -> str:
    """The three signals in one word each; "" where nobody answered."""
    if worker is None:
        return ""
    started, alive = "started" if worker.started else "starting", "alive" if worker.alive else "not alive"
    return f"{started}, {alive}, {'ready' if worker.ready else 'not ready'}"


def _scheduler(record: resources_pb2.ServiceRecord) -> scheduler_pb.GetStateResponse | None:
    try:
        with grpc.insecure_channel(record.endpoint, options=CLIENT_OPTIONS) as channel:
            stub = scheduler_grpc.SchedulerServiceStub(channel)
            state: scheduler_pb.GetStateResponse = stub.GetState(scheduler_pb.GetStateRequest(), timeout=_PROBE_S)
            return state
    except grpc.RpcError:
        return None


def _targets(alias: resources_pb2.Alias) -> Iterable[dict[str, Any]]:
    total = sum(target.weight for target in alias.targets) or 1
    for target in alias.targets:
        yield {"revision": target.revision, "weight": target.weight, "share": f"{100 * target.weight / total:.0f}%"}


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _age(snapshot: routing_pb2.RoutingSnapshot) -> str:
    if not snapshot.version:
        return "nothing is published yet"
    return f"published {max(0, time.time() - snapshot.publish_time.seconds):.0f} s ago"
