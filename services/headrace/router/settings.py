"""Settings of the Router."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from headrace.adapters.etcd_settings import EtcdSettings


class RouterSettings(EtcdSettings):
    """The [router] table of a config file."""

    listen: str = Field("127.0.0.1:50051", description="host:port for clients; port 0 takes any.")
    advertise: str = Field("", description="host:port that others use; empty: the address that 'listen' bound.")
    name: str = Field(
        default_factory=lambda: socket.gethostname().lower().split(".")[0],
        description="Id of this Router, unique in the fleet.",
    )
    metrics_listen: str = Field("127.0.0.1:0", description="host:port for Prometheus metrics; port 0 takes any.")
    log_level: str = Field("info", description="debug, info, warning or error.", pattern="^(debug|info|warning|error)$")
    realtime: bool = Field(
        False,
        description="Run before all else on the machine (SCHED_RR, which takes CAP_SYS_NICE and two cores): for where"
        " engines or callers share its cores.",
    )
    requests_max: int = Field(1024, description="Requests that may run at a time; more are refused.", ge=1)
    request_bytes_max: int = Field(
        2 * 1024 * 1024, description="Largest request in bytes; checked before it is parsed.", ge=1024, le=64 * 2**20
    )
    prompt_bytes_max: int = Field(1024 * 1024, description="Largest prompt in bytes of UTF-8.", ge=1)
    output_tokens_max: int = Field(8192, description="Most output tokens that one request may ask for.", ge=1)
    deadline_s_default: float = Field(600.0, description="Deadline of requests that set none, seconds.", gt=0)
    attempts_max: int = Field(3, description="Attempts for one request, all before its first token.", ge=1, le=5)
    ttft_target_s: float = Field(
        10.0,
        description="First tokens of CRITICAL and STANDARD requests should be there in this time, seconds: one that"
        " would wait for a slot for longer than four fifths of it is refused. 0: only 'queue_timeout_s' holds.",
        ge=0,
    )
    queue_timeout_s: float = Field(
        60.0, description="Longest wait for a slot, at any priority, seconds; 0: only the deadline.", ge=0
    )
    execution_timeout_s: float = Field(
        0.0, description="Longest run of one attempt, seconds; 0: only the deadline.", ge=0
    )
    credit_window_tokens: int = Field(
        32, description="Tokens that may be generated ahead of what the reader has taken.", ge=8, le=65536
    )
    credit_window_tokens_max: int = Field(
        4096, description="Largest window that a request may ask for.", ge=8, le=65536
    )
    slow_consumer_s: float = Field(
        30.0, description="A stream that is not read for this long, seconds, is ended.", ge=0.1
    )
    resume_events_max: int = Field(4096, description="Events kept for each request that can be resumed.", ge=64)
    resume_bytes_max: int = Field(1024 * 1024, description="Bytes of events kept for each of them.", ge=64 * 1024)
    resume_bytes_total_max: int = Field(
        64 * 1024 * 1024, description="Bytes of events kept for all requests that have ended.", ge=64 * 1024
    )
    resume_window_s: float = Field(
        60.0, description="How long a request runs without a reader, and is kept after its end, seconds.", ge=0.1
    )
    records_max: int = Field(4096, description="Ended requests that GetRequest still knows.", ge=0)
    record_retention_s: float = Field(300.0, description="How long it knows them, seconds.", ge=0)
    tenant_metadata: str = Field(
        "",
        description="Metadata key in which a trusted proxy names the tenant of a call; a request can be read, resumed"
        " and cancelled only by its tenant. It is believed as it is: set it only where no client reaches the port.",
        pattern="^[a-z0-9._-]{0,64}$",
    )
    past_hard_age: Literal["refuse", "serve"] = Field(
        "refuse",
        description="New requests while the snapshot is past its hard age, when a revocation may have been missed.",
    )
    authentication: Literal["open", "required"] = Field(
        "open",
        description="Callers without credentials: the tenant tenants/anonymous, or refused. A key that is sent must be"
        " good in either case.",
    )
    public_health: bool = Field(True, description="Whether health and reflection answer callers without credentials.")
    tls_certificate: str = Field(
        "",
        description="PEM file with the certificate chain of the client port; empty: no TLS. Read again when changed.",
    )
    tls_key: str = Field("", description="PEM file with its key, not encrypted.")
    tls_client_ca: str = Field(
        "",
        description="PEM file with the authorities of client certificates; with it, every client needs one, and the"
        " tenant that lists a name in it is the caller.",
    )
    tenant_labels_max: int = Field(
        20, description="Tenants with metrics of their own, the busiest; the others share one label.", ge=0, le=1000
    )
    usage_log: bool = Field(True, description="One log line for each request that is over: whose, what, how much.")
    drain_grace_s: float = Field(30.0, description="Time that running requests get when the Router stops.", ge=0)
    admin_secret_file: str = Field(
        "",
        description="File with the secret by which operators and Routers prove their calls at 'admin_listen', at least"
        " 32 characters; the same for all Routers. Further lines are accepted too, while a new one is brought in. Read"
        " again when changed.",
    )
    admin_insecure: bool = Field(
        False,
        description="Answer calls at 'admin_listen' that are not proven: they may read and end any tenant's requests."
        " Only where the network lets nobody else reach it.",
    )
    admin_advertise: str = Field(
        "", description="host:port that those use; empty: the address that 'admin_listen' bound."
    )
    admin_listen: str = Field(
        "127.0.0.1:0",
        description="host:port for operators and other Routers, never for clients; port 0 takes any. Beyond loopback"
        " it needs 'admin_secret_file'.",
    )
    idempotency_ttl_s: float = Field(
        1800.0,
        description="How long an idempotency key is remembered from its first use, seconds; longer where its request's"
        " deadline is.",
        ge=1,
    )
    idempotency_keys_max: int = Field(
        500_000,
        description="Keys of this Router that the store may hold, at some 700 bytes each; more are refused.",
        ge=1,
    )
    followers_max: int = Field(
        1024,
        description="Calls that may follow another call's request by its idempotency key, and calls about requests of"
        " other Routers; of each more are refused.",
        ge=1,
    )
    tokens_max: int = Field(
        0,
        description="Tokens, prompt and output as estimated, that running requests may reserve; 0: what the ready"
        " replicas and their queues can hold.",
        ge=0,
    )
    held_bytes_max: int = Field(
        512 * 1024 * 1024,
        description="Bytes that running requests may hold: input, output that may wait for its reader (16 bytes a token"
        " of the window), and events kept.",
        ge=1024 * 1024,
    )
    retry_share: float = Field(
        0.1, description="Attempts beyond the first that the fleet may make, as a share of its successes.", ge=0, le=10
    )
    retry_floor: int = Field(
        10, description="Such attempts that it may make in any 10 s, however few successes there are.", ge=0
    )
    hedge_after_s: float = Field(
        0.0,
        description="Wait for a first token, seconds, after which a second replica is asked too; 0: never.",
        ge=0,
    )
    continue_tokens_max: int = Field(
        32_768,
        description="Output tokens up to which a request with RECOVERY_CONTINUE goes on when its worker is lost; of a"
        " longer answer they are not kept. 0: such requests are interrupted as the others.",
        ge=0,
    )
    zones_excluded: str = Field(
        "", description="Zones of failure domains that get no new attempts, separated by commas: to empty one."
    )
    slow_start_s: float = Field(
        20.0, description="Time in which a replica that is new or has recovered comes to its full share, seconds.", ge=0
    )
    ejected_share_max: float = Field(
        0.5, description="Largest share of a revision's replicas that is left out because they fail.", ge=0, le=1
    )
    ejection_s: float = Field(
        5.0, description="How long a failing replica is left out first, seconds; each time twice as long.", gt=0, le=300
    )

    @field_validator("admin_listen")
    @classmethod
    def _admin_is_closed(cls, value: str, info: ValidationInfo) -> str:
        """Others may reach it: then they must prove who they are, and be told an address that leads here."""
        if is_loopback(value):
            return value
        if not (info.data.get("admin_secret_file") or info.data.get("admin_insecure")):
            raise ValueError(
                "others reach it, so calls must be proven: set admin_secret_file (or admin_insecure, where the network"
                " lets nobody else reach it)"
            )
        if _is_wildcard(value) and not info.data.get("admin_advertise"):
            raise ValueError("it is no address that others can reach: set admin_advertise")
        return value


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches host:port."""
    host = _host(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(_host(address)).is_unspecified
    except ValueError:
        return not _host(address)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
