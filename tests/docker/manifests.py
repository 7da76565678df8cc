"""The YAML of docker/, parsed; and what it may name: metrics, ports, settings, health services."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client as prom
import yaml

from headrace.control.attempts import AttemptLedger
from headrace.control.overload import OverloadSettings
from headrace.control.worker_queue import QueueSettings
from headrace.router.metrics import RouterMetrics
from headrace.runtime.membership import LeaseState
from headrace.scheduler.metrics import make_registry
from headrace.scheduler.relay import Relay

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
KUBERNETES = sorted(path for path in (DOCKER / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
SIGNALS = {"startupProbe": "startup", "livenessProbe": "liveness", "readinessProbe": "readiness"}


def resources() -> Iterator[dict[str, Any]]:
    """All resources of docker/kubernetes."""
    for path in KUBERNETES:
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    """Resources of these kinds."""
    return [resource for resource in resources() if resource["kind"] in kinds]


def workloads() -> list[dict[str, Any]]:
    """What makes pods."""
    return of_kind("Deployment", "StatefulSet")


def name_of(resource: dict[str, Any]) -> str:
    """For a test's id."""
    return str(resource["metadata"]["name"])


def service_of(workload: dict[str, Any]) -> str:
    """The service that it runs: router, registry or scheduler."""
    return str(workload["spec"]["template"]["spec"]["containers"][0]["name"])


def environment(workload: dict[str, Any]) -> dict[str, str]:
    """What its container is given, as Kubernetes would fill it in."""
    found = {}
    for variable in workload["spec"]["template"]["spec"]["containers"][0]["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        filled = {"status.podIP": "10.0.0.7", "metadata.name": name_of(workload), "spec.nodeName": "node-1"}
        found[variable["name"]] = variable.get("value", filled.get(path, ""))
    return {name: value.replace("$(POD_IP)", found["POD_IP"]) for name, value in found.items()}


def config_table(service: str) -> dict[str, Any]:
    """A service's table of the ConfigMap's file."""
    (config,) = of_kind("ConfigMap")
    table = tomllib.loads(config["data"]["headrace.toml"])[service]
    assert isinstance(table, dict)
    return table


def compose() -> dict[str, Any]:
    """docker/compose.yaml, its variables replaced by their defaults."""
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    assert isinstance(document, dict)
    return document


def dockerfile_targets() -> list[str]:
    """Names of the stages of docker/Dockerfile."""
    return re.findall(r"^FROM \S+ AS (\S+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)


def exposed_metrics() -> set[str]:
    """Names as a scrape of a Router and of a Scheduler has them."""
    return _names(RouterMetrics().registry) | _names(_scheduler_registry())


def _names(registry: prom.CollectorRegistry) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", prom.generate_latest(registry).decode(), re.MULTILINE))


def _scheduler_registry() -> prom.CollectorRegistry:
    fleet: Any = SimpleNamespace(workers={}, restarts={})
    vitals: Any = SimpleNamespace(lease=SimpleNamespace(age_s=0.0, state=LeaseState.HELD))
    return make_registry(Relay(AttemptLedger(QueueSettings()), OverloadSettings()), fleet, vitals)
