"""Settings of the Scheduler."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from headrace.adapters.etcd_settings import Endpoint, EtcdSettings
from headrace.control import names
from headrace.control.overload import OverloadSettings
from headrace.control.worker_queue import QueueSettings
from headrace.triton.workspace import DEFAULT_CACHE_DIR


def _split(value: Any) -> Any:
    """Accept "a,b" beside ["a", "b"], for the environment and the command line."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_name(value: str) -> str:
    if not names.is_id(value):
        raise ValueError(f"must be {names.ID_RULE}")
    return value


def host_id() -> str:
    """This machine's name as an id."""
    return re.sub(r"^[^a-z]+", "", names.id_from_text(socket.gethostname().split(".")[0])) or "host"


class SchedulerSettings(EtcdSettings):
    """The [scheduler] table of a config file."""

    listen: str = Field("127.0.0.1:50053", description="host:port for Routers; port 0 takes any.")
    advertise: str = Field("", description="host:port that Routers use; empty: the address that 'listen' bound.")
    name: Annotated[str, pydantic.AfterValidator(_check_name)] = Field(
        default_factory=host_id, description="Id of this Scheduler, unique in the fleet; it names its replicas."
    )
    metrics_listen: str = Field("127.0.0.1:0", description="host:port for Prometheus metrics; port 0 takes any.")
    log_level: str = Field("info", description="debug, info, warning or error.", pattern="^(debug|info|warning|error)$")
    realtime: bool = Field(
        False,
        description="Run before all else on the machine (SCHED_RR, which takes CAP_SYS_NICE and two cores): for where"
        " engines or callers share its cores.",
    )
    engines: Annotated[
        tuple[Literal["llamacpp", "synthetic", "tensorrt_llm", "vllm", "sglang"], ...], pydantic.BeforeValidator(_split)
    ] = Field(
        ("llamacpp", "synthetic"),
        description="Engines that this Scheduler starts workers for; tensorrt_llm, vllm and sglang have to be named.",
    )
    gpus: Annotated[tuple[str, ...], pydantic.BeforeValidator(_split)] = Field(
        (),
        description="GPUs that workers of GPU engines get, each its own: indices or UUIDs, as CUDA_VISIBLE_DEVICES has "
        "them. Empty: those in that variable, else all of this machine. Two Schedulers must not have the same.",
    )
    workers_max: int = Field(4, description="Most workers here, attached ones included.", ge=0, le=64)
    attach: Annotated[tuple[Endpoint, ...], pydantic.BeforeValidator(_split)] = Field(
        (), description="host:port of Tritons that run already with our model; each becomes a worker."
    )
    model_repository: Path | None = Field(None, description="Triton model repository; empty: the one that ships.")
    cache_dir: Path = Field(DEFAULT_CACHE_DIR, description="Where Triton is copied to once.")
    state_dir: Path = Field(
        Path("~/.local/state/headrace"), description="Workers' logs and configs, and which artifacts were verified."
    )
    signature_policy: Literal["off", "required"] = Field(
        "off", description="required: load only artifacts whose signature over all files is good by 'signature_key'."
    )
    signature_key: Path | None = Field(
        None, description="PEM file of the elliptic-curve public key that artifacts must be signed with."
    )
    threads: int = Field(
        0,
        description="Compute threads of an engine whose revision leaves it open; 0: all cores of a machine with up to "
        "four, else all but one.",
        ge=0,
    )
    host: str = Field(default_factory=host_id, description="Failure domain: machine.")
    rack: str = Field("", description="Failure domain: rack.")
    zone: str = Field("", description="Failure domain: zone.")
    start_deadline_s: float = Field(600.0, description="Time that a worker gets to verify, start and load.", gt=0)
    warm_up_deadline_s: float = Field(
        120.0, description="Time that a loaded worker gets to run the shapes that its engine declares.", gt=0
    )
    worker_memory_mib: int = Field(
        0,
        description="Memory, other than pages of files, at which a worker is drained and started again, before the "
        "kernel ends it; 0: no limit.",
        ge=0,
    )
    drain_grace_s: float = Field(
        30.0, description="Time that running attempts get when a worker or this service stops.", ge=0
    )
    queue_requests_max: int = Field(
        0, description="Attempts that may wait for one worker; 0: twice its slots, and 16 at least.", ge=0
    )
    queue_kv_times_max: float = Field(
        4.0, description="KV cells that those who wait for one worker may need, in multiples of what it has.", gt=0
    )
    queue_bytes_max: int = Field(
        64 * 1024 * 1024, description="Bytes of input that may wait for all workers together.", ge=1024
    )
    kv_over_commit: float = Field(
        1.0,
        description="KV cells that a worker's running attempts may be promised, in multiples of what it has; they are "
        "counted as prompt and highest output, of which few attempts use all. Where cells run short, the engine "
        "preempts the newest.",
        ge=1.0,
        le=4.0,
    )
    stage_ahead: int = Field(
        1, description="Attempts that an engine is given beyond its slots, so that none is idle.", ge=0, le=8
    )
    short_slots_share: float = Field(
        0.125,
        description="Share of a worker's slots that long requests leave to short ones (prompt up to 256 tokens, output "
        "up to 128) as far as those have used it of late.",
        ge=0,
        lt=1,
    )
    step_target_ms: float = Field(
        0.0,
        description="Time that a step of an engine may take before it is given fewer attempts at a time, milliseconds;"
        " 0: 'step_tolerance' times what is usual for the worker when all its slots are busy.",
        ge=0,
    )
    step_tolerance: float = Field(3.0, description="See 'step_target_ms'.", gt=1)
    queue_age_target_s: float = Field(
        2.0, description="Wait for a slot that is good enough, seconds; a queue stands where none is shorter.", gt=0
    )
    queue_age_interval_s: float = Field(
        10.0, description="How long a queue has to stand before work of low priority is shed from it, seconds.", gt=0
    )

    def overload_settings(self) -> OverloadSettings:
        """When a worker has too much."""
        return OverloadSettings(
            step_target_s=self.step_target_ms / 1000,
            step_tolerance=self.step_tolerance,
            queue_age_target_s=self.queue_age_target_s,
            queue_age_interval_s=self.queue_age_interval_s,
        )

    def queue_settings(self) -> QueueSettings:
        """What may wait for a worker, and what its engine is given."""
        return QueueSettings(
            requests_max=self.queue_requests_max,
            kv_times_max=self.queue_kv_times_max,
            bytes_max=self.queue_bytes_max,
            over_commit=self.kv_over_commit,
            stage_ahead=self.stage_ahead,
            short_share=self.short_slots_share,
        )
