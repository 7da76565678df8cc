"""The manifests and the compose file: valid by schema, and true to the code and to the rules of docs/deployment.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import pytest
import yaml

from docker.manifests import (
    DOCKER,
    KUBERNETES,
    ROOT,
    SIGNALS,
    compose,
    config_table,
    dockerfile_targets,
    environment,
    exposed_metrics,
    name_of,
    of_kind,
    resources,
    service_of,
    workloads,
)
from headrace.api.inference.v1 import inference_service_pb2
from headrace.api.registry.v1 import registry_service_pb2
from headrace.cli.health import local_address
from headrace.cli.serve import service_settings
from headrace.runtime.settings import load_settings

SCHEMAS = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
CLIENT_SERVICES = {
    "router": inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    "registry": registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
}
UID = 10001
AS_ROOT = {"volumes-init"}
"""Gives a fresh volume to user 10001, and ends."""
OURS = {"router", "registry", "worker-cpu", "worker-gpu"}
every_workload = pytest.mark.parametrize("workload", workloads(), ids=name_of)


def check_schema(document: Any, schema: str) -> None:
    jsonschema.validate(document, json.loads((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("resource", list(resources()), ids=lambda r: f"{r['kind']}-{name_of(r)}")
def test_resources_are_valid(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, "1.37", strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_validator_can_refuse() -> None:
    (resource,) = of_kind("StatefulSet")
    resource["spec"]["template"]["spec"]["containers"][0]["livnessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, "1.37", strict=True)


def test_the_compose_file_is_valid() -> None:
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    check_schema(yaml.safe_load(text), "compose-spec")
    broken = compose()
    broken["services"]["router"]["restarts"] = "always"
    with pytest.raises(jsonschema.ValidationError):
        check_schema(broken, "compose-spec")


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.name)
def test_workflows_are_valid(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    document["on"] = document.pop(True)  # what YAML 1.1 makes of the key
    check_schema(document, "github-workflows")


def test_kustomization_names_files_that_exist() -> None:
    listed = yaml.safe_load((DOCKER / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert set(listed) == {path.name for path in KUBERNETES} - {"secret.example.yaml", "worker-gpu.yaml"}


# Kubernetes: what each pod may do


@every_workload
def test_pods_are_restricted(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert "hostNetwork" not in pod
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_the_namespace_enforces_it() -> None:
    (namespace,) = of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@every_workload
def test_what_is_written_has_a_volume(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    mounts = {m["mountPath"]: m for m in pod["containers"][0]["volumeMounts"]}
    assert {m["name"] for m in mounts.values()} <= {volume["name"] for volume in pod["volumes"]}
    wanted = {"/tmp"} | ({"/dev/shm", "/var/lib/headrace/state"} if service_of(workload) == "scheduler" else set())
    assert wanted <= {path for path, mount in mounts.items() if not mount.get("readOnly")}


# Kubernetes: settings, ports, probes


@every_workload
def test_settings_load_and_ports_are_theirs(workload: dict[str, Any], tmp_path: Path) -> None:
    service, environ = service_of(workload), environment(workload)
    file = tmp_path / "headrace.toml"
    file.write_text(of_kind("ConfigMap")[0]["data"]["headrace.toml"])
    settings: Any = load_settings(service_settings(service), service, file=file, environ=environ)
    known = {name for name in environ if name.startswith("HEADRACE_")}
    assert known <= {f"HEADRACE_{service.upper()}_{field.upper()}" for field in type(settings).model_fields}
    container = workload["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listens = {"grpc": settings.listen, "metrics": settings.metrics_listen}
    if service == "router":
        listens["admin"] = settings.admin_listen
    # A wildcard would be what others are told: they must reach this pod at it.
    assert listens == {name: f"10.0.0.7:{port}" for name, port in ports.items()}
    assert settings.advertise in ("", settings.listen)
    assert service in container["image"] or service == "scheduler"


@every_workload
def test_probes_ask_for_the_three_signals(workload: dict[str, Any]) -> None:
    service = service_of(workload)
    container = workload["spec"]["template"]["spec"]["containers"][0]
    ports = {port["containerPort"] for port in container["ports"]}
    for probe, signal in SIGNALS.items():
        asked = container[probe]["grpc"]
        assert asked["port"] in ports
        if service == "scheduler":
            assert asked["service"] == signal
        else:
            assert asked.get("service", "") in ("", CLIENT_SERVICES[service])
    if service != "scheduler":
        assert container["readinessProbe"]["grpc"]["service"] == CLIENT_SERVICES[service]


def test_the_schedulers_names_are_those_that_it_serves() -> None:
    served = (ROOT / "services/headrace/scheduler/vitals.py").read_text(encoding="utf-8")
    for signal in SIGNALS.values():
        assert f'"{signal}": signals.' in served


@every_workload
def test_a_start_and_a_drain_have_their_time(workload: dict[str, Any]) -> None:
    service, pod = service_of(workload), workload["spec"]["template"]["spec"]
    container, table = pod["containers"][0], config_table(service)
    before_s = 0
    if "lifecycle" in container:
        assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"
        before_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert service == "scheduler" or before_s >= 5, "behind a Service, endpoints take a while to go"
    assert pod["terminationGracePeriodSeconds"] >= before_s + table["drain_grace_s"] + 10
    probe = container["startupProbe"]
    start_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert start_s >= table.get("start_deadline_s", 0) + table.get("warm_up_deadline_s", 0)


# Kubernetes: what a failure takes along


@every_workload
def test_disruptions_are_bounded_and_pods_are_spread(workload: dict[str, Any]) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    budgets = [b for b in of_kind("PodDisruptionBudget") if b["spec"]["selector"]["matchLabels"] == labels]
    assert [budget["spec"]["maxUnavailable"] for budget in budgets] == [1]
    spread = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert {c["topologyKey"] for c in spread} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    assert all(constraint["labelSelector"]["matchLabels"] == labels for constraint in spread)
    least = {"registry": 3, "router": 2, "scheduler": 1}[service_of(workload)]
    assert workload["spec"]["replicas"] >= least


def test_services_lead_to_ports_of_pods_and_none_to_an_operators_port() -> None:
    for service in of_kind("Service"):
        (workload,) = (
            w for w in workloads() if w["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        )
        ports = workload["spec"]["template"]["spec"]["containers"][0]["ports"]
        names = {port["name"]: port["containerPort"] for port in ports}
        for port in service["spec"]["ports"]:
            assert names[port["targetPort"]] == port["port"]
            assert port["targetPort"] == "grpc"


def test_autoscalers_read_metrics_that_are_exposed() -> None:
    exposed, names = exposed_metrics(), {name_of(workload) for workload in workloads()}
    for scaler in of_kind("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in names
        for metric in scaler["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"] in exposed


def test_policies_deny_first_and_let_in_to_ports_that_exist() -> None:
    policies = {name_of(policy): policy["spec"] for policy in of_kind("NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    pods = {w["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: w for w in workloads()}
    known = {
        port["containerPort"]
        for workload in pods.values()
        for port in workload["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    for spec in policies.values():
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            assert {port["port"] for port in rule["ports"]} <= known | {53, 2379}
            assert rule.get("from") or rule.get("to"), "an empty peer list would mean everybody"
    clients = [rule for rule in policies["router"]["ingress"] if "namespaceSelector" in rule["from"][0]]
    assert [port["port"] for rule in clients for port in rule["ports"]] == [50051]


def test_no_secret_is_in_the_config_map() -> None:
    assert "password =" not in of_kind("ConfigMap")[0]["data"]["headrace.toml"]
    for secret in of_kind("Secret"):
        assert {value for key, value in secret["stringData"].items() if key != "ca.pem"} == {"replace-me"}


def test_only_routers_have_the_secret_of_their_admin_port() -> None:
    (router,) = (workload for workload in workloads() if service_of(workload) == "router")
    holders = [name_of(w) for w in workloads() if "headrace-admin" in json.dumps(w["spec"]["template"]["spec"])]
    assert holders == [name_of(router)]
    pod, path = router["spec"]["template"]["spec"], Path(config_table("router")["admin_secret_file"])
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == str(path.parent))
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    (made,) = (s for s in of_kind("Secret") if name_of(s) == volume["secret"]["secretName"])
    assert path.name in made["stringData"]
    services = compose()["services"]
    assert [name for name, service in services.items() if "admin-secret" in service.get("secrets", [])] == ["router"]
    given = services["router"]["environment"]["HEADRACE_ROUTER_ADMIN_SECRET_FILE"]
    assert given == "/run/secrets/admin-secret"
    assert compose()["secrets"]["admin-secret"]["file"].endswith("/admin-secret")


# Compose


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_containers_are_confined(name: str) -> None:
    service = compose()["services"][name]
    assert (service["user"] == f"{UID}:{UID}") == (name not in AS_ROOT)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


def test_only_clients_and_administration_are_published_and_on_loopback() -> None:
    published = {name: s["ports"] for name, s in compose()["services"].items() if "ports" in s}
    assert published == {"router": ["127.0.0.1:50051:50051"], "registry": ["127.0.0.1:50052:50052"]}
    assert compose()["networks"]["inside"]["internal"] is True


@pytest.mark.parametrize("name", sorted(OURS))
def test_services_load_their_settings_and_use_etcds_user(name: str) -> None:
    service = compose()["services"][name]
    kind = "scheduler" if name.startswith("worker") else name
    settings: Any = load_settings(service_settings(kind), kind, environ=service["environment"])
    prefix = f"HEADRACE_{kind.upper()}_"
    known = {prefix + field.upper() for field in type(settings).model_fields}
    assert {key for key in service["environment"] if key.startswith("HEADRACE_")} <= known
    assert settings.etcd_username == "headrace"
    assert str(settings.etcd_password_file) == f"/run/secrets/{service['secrets'][0]}"
    assert service["depends_on"] == {"etcd-auth": {"condition": "service_completed_successfully"}}
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.drain_grace_s + 10
    assert service["build"]["target"] in dockerfile_targets()


@pytest.mark.parametrize("name", sorted(OURS | {"etcd"}))
def test_health_is_asked_by_grpc_and_by_our_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"][name]
    command = service["healthcheck"]["test"]
    if name == "etcd":
        assert command[:2] == ["CMD", "etcdctl"]
        return
    assert command[:3] == ["CMD", "headrace", "health"]
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value)
    assert local_address(command[3], None).rpartition(":")[2] == service["environment"][
        f"HEADRACE_{command[3].upper()}_LISTEN"
    ].rpartition(":")[2]  # fmt: skip


def test_profiles_and_the_gpus_own_needs() -> None:
    services = compose()["services"]
    assert {name: s["profiles"] for name, s in services.items() if "profiles" in s} == {
        "worker-cpu": ["cpu"], "worker-gpu": ["gpu"],
    }  # fmt: skip
    gpu = services["worker-gpu"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu["shm_size"] == "2gb"
    assert gpu["ulimits"]["memlock"] == -1


def test_versions_are_pinned() -> None:
    images = [s["image"] for s in compose()["services"].values()]
    images += [w["spec"]["template"]["spec"]["containers"][0]["image"] for w in workloads()]
    images += re.findall(r"^ARG \w*BASE=(\S+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for image in images:
        assert re.search(r":v?\d|:bookworm-\d{8}-slim$", image), image
