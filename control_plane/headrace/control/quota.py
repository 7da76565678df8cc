"""What each tenant uses of its limits in one Router: requests and tokens a minute, and requests at a time.

    admit(tenant, estimate) ──> Charge ──> settle(used)     it ran, whatever its end
                                      └──> cancel()         it was never started

Limits are of the fleet. A Router enforces its share, limit / Routers, so that no request waits for another Router's
answer; traffic that is spread unevenly meets its share before the limit. Tokens are taken by an estimate and settled
by what was used; what was used beyond the bucket is a debt that the next requests wait for. A charge ends exactly once.

Sans-io: the time is an argument, monotonic seconds. Each decision is O(1).
"""

from __future__ import annotations

import enum
from collections.abc import Container
from dataclasses import dataclass

from headrace.control.errors import Failure, Reason
from headrace.control.tenants import Tenant

_EPSILON = 1e-6
"""Of a request or a token: sums of floats may miss a limit by less."""


class Quota(enum.Enum):
    """A limit, by the name that errors give it."""

    REQUESTS = "requestsPerMinute"
    TOKENS = "tokensPerMinute"
    CONCURRENCY = "concurrency"


class Bucket:
    """Fills evenly to one minute's worth, at least 1; begins full. Below zero it is in debt."""

    __slots__ = ("_at", "_capacity", "_per_s", "level")

    def __init__(self, per_minute: float, now: float) -> None:
        self._at = now
        self._per_s = per_minute / 60
        self._capacity = self.level = max(per_minute, 1.0)

    def refill(self, per_minute: float, now: float) -> None:
        """Add what has flowed in since the last time, then go on with this rate."""
        self.flow(now)
        self._per_s, self._capacity = per_minute / 60, max(per_minute, 1.0)
        self.level = min(self.level, self._capacity)

    def wait_s(self, amount: float) -> float:
        """How long until `amount` may be taken; 0: now. More than it can hold may be taken once it is full."""
        missing = min(amount, self._capacity) - self.level
        return missing / self._per_s if missing > _EPSILON else 0.0

    def take(self, amount: float) -> None:
        """Take, into debt if need be; a negative amount gives back, up to full."""
        self.level = min(self.level - amount, self._capacity)

    def is_full(self, now: float) -> bool:
        """Whether nothing was taken that has not flowed in again."""
        self.flow(now)
        return self.level >= self._capacity - _EPSILON

    def flow(self, now: float) -> None:
        """Add what has flowed in since the last time."""
        self.level = min(self._capacity, self.level + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)


@dataclass(slots=True, eq=False)
class Charge:
    """What one request has taken of its tenant's limits."""

    tenant: str
    tokens: int
    """Estimated."""
    is_open: bool = True
    """Not settled or cancelled yet."""


@dataclass(slots=True)
class _Use:
    """One tenant's use."""

    running: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Quotas:
    """The use of all tenants."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests of all tenants that have been admitted and not ended."""
        self._uses: dict[str, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def running(self, tenant: str) -> int:
        """Requests of a tenant that have been admitted and not ended."""
        use = self._uses.get(tenant)
        return use.running if use is not None else 0

    def tokens_left(self, tenant: str) -> float | None:
        """What its bucket of tokens held when last looked at; None where it has none."""
        use = self._uses.get(tenant)
        return use.tokens.level if use is not None and use.tokens is not None else None

    def admit(self, tenant: Tenant, estimate: int, routers: int, now: float) -> Charge:
        """Charge a request to its tenant: all limits, or none of them.

        Args:
            tenant: whose request it is, with the limits of now.
            estimate: its tokens, prompt and output.
            routers: Routers that share the limits.
            now: monotonic seconds.

        Raises:
            Failure: QUOTA_EXCEEDED, with the time until the request would pass if nothing else came.
        """
        use = self._uses.setdefault(tenant.name, _Use())
        share = 1 / max(routers, 1)
        use.requests = _bucket(use.requests, tenant.requests_per_minute * share, now)
        use.tokens = _bucket(use.tokens, tenant.tokens_per_minute * share, now)
        waits = (
            (use.requests.wait_s(1) if use.requests else 0.0, Quota.REQUESTS, tenant.requests_per_minute),
            (use.tokens.wait_s(estimate) if use.tokens else 0.0, Quota.TOKENS, tenant.tokens_per_minute),
        )
        wait_s, quota, limit = max(waits, key=lambda found: found[0])
        if wait_s > 0:
            raise _exceeded(tenant, quota, limit, wait_s)
        if tenant.concurrency and use.running >= concurrency_share(tenant.concurrency, routers):
            raise _exceeded(tenant, Quota.CONCURRENCY, tenant.concurrency, None)
        use.running += 1
        self.in_flight += 1
        if use.requests is not None:
            use.requests.take(1)
        if use.tokens is not None:
            use.tokens.take(estimate)
        return Charge(tenant.name, estimate)

    def settle(self, charge: Charge, used: int, now: float) -> bool:
        """The request is over and has used so many tokens, whatever its end. False: it was settled before."""
        use = self._close(charge)
        if use is None:
            return False
        if use.tokens is not None:
            use.tokens.flow(now)
            use.tokens.take(used - charge.tokens)
        return True

    def cancel(self, charge: Charge, now: float) -> bool:
        """The request was never started: it has used nothing. False: it was settled before."""
        use = self._close(charge)
        if use is None:
            return False
        for bucket, amount in ((use.requests, 1), (use.tokens, charge.tokens)):
            if bucket is not None:
                bucket.flow(now)
                bucket.take(-amount)
        return True

    def sweep(self, known: Container[str], now: float) -> None:
        """Forget tenants that are not known any more or that have used nothing lately; those that run stay."""
        for name, use in list(self._uses.items()):
            if not use.running and (name not in known or _is_unused(use, now)):
                del self._uses[name]

    def _close(self, charge: Charge) -> _Use | None:
        if not charge.is_open:
            return None
        charge.is_open = False
        use = self._uses[charge.tenant]  # it has been running until now, so it was not forgotten
        use.running -= 1
        self.in_flight -= 1
        return use


def concurrency_share(limit: int, routers: int) -> int:
    """How many requests one Router runs at a time of a fleet's limit: its share, rounded down, at least one."""
    return max(1, limit // max(routers, 1))


def _bucket(bucket: Bucket | None, per_minute: float, now: float) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.refill(per_minute, now)
    return bucket


def _is_unused(use: _Use, now: float) -> bool:
    return all(bucket is None or bucket.is_full(now) for bucket in (use.requests, use.tokens))


def _exceeded(tenant: Tenant, quota: Quota, limit: int, wait_s: float | None) -> Failure:
    words = {
        Quota.REQUESTS: f"{limit} requests a minute",
        Quota.TOKENS: f"{limit} tokens a minute",
        Quota.CONCURRENCY: f"{limit} requests at a time",
    }
    return Failure(
        Reason.QUOTA_EXCEEDED,
        f"{tenant.name} has used its {words[quota]}; send less, or later.",
        metadata={"tenant": tenant.name, "quota": quota.value, "limit": str(limit)},
        retry_after_s=wait_s,
    )
