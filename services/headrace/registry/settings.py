"""Settings of the Registry."""

from __future__ import annotations

import socket
from typing import Annotated

import pydantic
from pydantic import Field

from headrace.adapters.etcd_settings import EtcdSettings
from headrace.control import names
from headrace.control.snapshot import HARD_AGE_S, SOFT_AGE_S
from headrace.runtime.membership import TTL_S


def _check_name(value: str) -> str:
    if not names.is_id(value):
        raise ValueError(f"must be {names.ID_RULE}")
    return value


def _host_id() -> str:
    return names.id_from_text(socket.gethostname().split(".")[0])


class RegistrySettings(EtcdSettings):
    """The [registry] table of a config file."""

    listen: str = Field("127.0.0.1:50052", description="host:port for administration; port 0 takes any.")
    advertise: str = Field("", description="host:port that others use; empty: the address that 'listen' bound.")
    name: Annotated[str, pydantic.AfterValidator(_check_name)] = Field(
        default_factory=_host_id, description="Id of this Registry, unique in the fleet."
    )
    metrics_listen: str = Field("127.0.0.1:0", description="host:port for Prometheus metrics; port 0 takes any.")
    log_level: str = Field("info", description="debug, info, warning or error.", pattern="^(debug|info|warning|error)$")
    lease_ttl_s: int = Field(
        TTL_S, description="Seconds after which a Registry that has died is replaced as leader.", ge=2, le=300
    )
    snapshot_soft_age_s: float = Field(
        SOFT_AGE_S, description="Readers without news of the store for this many seconds say so.", gt=0
    )
    snapshot_hard_age_s: float = Field(
        HARD_AGE_S, description="And after this many, what needs fresh authority fails closed.", gt=0
    )
    drain_grace_s: float = Field(5.0, description="Time that running calls get when the Registry stops.", ge=0)

    @pydantic.model_validator(mode="after")
    def _ages_in_order(self) -> RegistrySettings:
        if self.snapshot_hard_age_s < self.snapshot_soft_age_s:
            raise ValueError("'snapshot_hard_age_s' must not be below 'snapshot_soft_age_s'")
        return self
