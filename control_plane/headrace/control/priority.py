"""How requests rank under load; the same names as headrace.api.inference.v1.Priority, without its prefix."""

from __future__ import annotations

import enum


class Priority(enum.IntEnum):
    """Higher is served sooner and refused later. The numbers are those of the proto."""

    SHEDDABLE = 1
    """Refused first; may wait long."""
    BATCH = 2
    """Work that should be done, without a person who waits."""
    STANDARD = 3
    """A person waits."""
    CRITICAL = 4
    """Refused last."""
