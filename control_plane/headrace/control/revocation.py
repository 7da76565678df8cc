"""What was taken out of service at once, whatever aliases and leases say. Sans-io."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Revocation:
    """One revision, replica or tenant's key that must not be used, until the revocation is lifted."""

    name: str
    """What: "models/{m}/revisions/{d12}", "replicas/{r}" or "tenants/{t}/keys/{k}"."""
    reason: str = ""
    """Why, for a person."""
    end_running: bool = False
    """Whether requests that run on it are ended, too."""
    create_time_ms: int = 0
    """Unix time, for people."""
