"""What it would cost a request to go to a replica: a sum of named parts, each in seconds of expected wait.

Sans-io. Seconds, because they can be added: a prefix that is kept there is worth the prefill that it saves, and a queue
costs what it takes to drain. The parts are those of headrace.api.router.v1.ScorePart; docs/routing.md says what each
means to an operator. A score looks at nothing but its replica and its revision's habits. It explains:
decisions compare totals as `headrace.control.costs` makes them, at a fraction of the price.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.control.load_view import Habits, Standing
from headrace.control.resources import FailureDomain

SHARING = 0.1
"""What a full worker costs more than an empty one before anybody waits, in attempts' times: sequences share steps."""

SPREAD = 0.1
"""What it costs to have one zone hold all in place of its share, in attempts' times."""

SAME_HOST, SAME_RACK, SAME_ZONE = 1.0, 0.5, 0.25
"""What it costs to try again beside what failed, in attempts' times: what failed may have failed for both."""

AFFINITY = 0.5
"""Belief that the home of a session still has its prefix, where nothing else is known of it."""

AFFINITY_S = 0.005
"""What being the home is worth at least, seconds: it decides between equals."""

REFUSAL_S = 10.0
"""What it costs to ask where requests of this priority are refused at present, seconds."""


class Score(NamedTuple):
    """Parts of a score, in seconds; negative ones make a replica more likely."""

    queue_wait: float = 0.0
    """Until there is a slot, by the latest report and what this Router sent since; and sharing steps with others."""
    prefill: float = 0.0
    """Of the whole prompt."""
    kv_headroom: float = 0.0
    """Until cells for prompt and output are free: all of them turn over once in the time of an attempt."""
    prefix_locality: float = 0.0
    """The prefill that a kept prefix saves."""
    affinity: float = 0.0
    """Being the home of the session."""
    spread: float = 0.0
    """Being in a failure domain that holds more than its share, or in one that just failed this request."""
    slow_start: float = 0.0
    """Being new or just recovered: as if it had fewer slots."""
    stale_load: float = 0.0
    """What the report's age changes: towards what is usual for the revision."""

    @property
    def total(self) -> float:
        """The score; lower is better."""
        return sum(self)


def wait_s(attempts: float, width: float, service_s: float) -> float:
    """Expected cost of coming to `attempts` others where `width` run at a time, each for `service_s` seconds."""
    queued = attempts + 1.0 - width
    return service_s * (SHARING * attempts + (queued if queued > 0.0 else 0.0)) / width


def score(
    standing: Standing,
    weight: float,
    ramp: float,
    prompt_tokens: float,
    output_tokens: int,
    cached_share: float,
    is_home: bool,
    priority: int,
    failed: tuple[FailureDomain, ...] = (),
) -> Score:
    """Score one replica for one request.

    Args:
        standing: what is known of the replica; it is in the snapshot.
        weight: how much its report counts, 0 to 1.
        ramp: how far its slow start has come, above 0 to 1.
        prompt_tokens: of the request, as estimated.
        output_tokens: most of them.
        cached_share: of the prompt that is believed to be kept there, 0 to 1.
        is_home: whether the request's session was there.
        priority: the request's.
        failed: domains of the replicas that this request was tried on.
    """
    habits, report = standing.habits, standing.report
    own, service_s = standing.own, habits.service_s
    if report is None:
        assert standing.replica is not None
        width, rate = standing.replica.slots or 1, habits.prefill_tokens_per_s
        others = habits.others_per_slot * width
        fresh, aged = wait_s(own, width, service_s), wait_s(own + others, width, service_s)
    else:
        width, rate = report.width, report.prefill_tokens_per_s or habits.prefill_tokens_per_s
        theirs = standing.theirs
        others = weight * theirs + (1.0 - weight) * habits.others_per_slot * width
        fresh, aged = wait_s(own + theirs, width, service_s), wait_s(own + others, width, service_s)
        if report.queue_wait_s is not None:
            # The Scheduler measured; what has changed since is ours to add.
            measured = report.queue_wait_s - _queue_s(report.active + report.waiting, width, service_s)
            aged, fresh = aged + weight * measured, fresh + measured
            aged, fresh = aged if aged > 0.0 else 0.0, fresh if fresh > 0.0 else 0.0
        if report.admits_from > priority:
            aged, fresh = aged + weight * REFUSAL_S, fresh + REFUSAL_S
    prefill = prompt_tokens / rate
    saved = prefill * cached_share
    kv = slow = spread = 0.0
    if report is not None and report.kv_cells:
        needed = prompt_tokens * (1.0 - cached_share) + output_tokens
        missing = needed - report.kv_cells + report.kv_cells_reserved
        kv = weight * service_s * min(1.0, missing / report.kv_cells) if missing > 0.0 else 0.0
    if ramp < 1.0:
        slow = wait_s(own + others, max(1.0, width * ramp), service_s) - wait_s(own + others, width, service_s)
    if failed or len(habits.slots_by_zone) > 1:
        spread = spread_s(standing, habits, failed)
    home = -AFFINITY_S - (0.0 if saved else AFFINITY * prefill) if is_home else 0.0
    return Score(fresh, prefill, kv, -saved, home, spread, slow, aged - fresh)


def _queue_s(attempts: float, width: float, service_s: float) -> float:
    queued = attempts + 1.0 - width
    return service_s * queued / width if queued > 0.0 else 0.0


def spread_s(standing: Standing, habits: Habits, failed: tuple[FailureDomain, ...]) -> float:
    """The part `spread`; see `Score`."""
    assert standing.replica is not None
    cost = 0.0
    if habits.in_flight and habits.slots:
        held = habits.in_flight_by_zone[standing.zone] / habits.in_flight
        excess = held - habits.slots_by_zone[standing.zone] / habits.slots
        cost = SPREAD * excess if excess > 0.0 else 0.0
    domain = standing.replica.failure_domain
    beside = 0.0
    for other in failed:
        beside = max(beside, _beside(domain, other))
    return habits.service_s * (cost + beside)


def _beside(one: FailureDomain, other: FailureDomain) -> float:
    if not one.zone or one.zone != other.zone:
        same_host = bool(one.host) and one.host == other.host and one.zone == other.zone
        return SAME_HOST if same_host else 0.0
    if one.rack != other.rack:
        return SAME_ZONE
    if one.host and one.host == other.host:
        return SAME_HOST
    return SAME_RACK if one.rack else SAME_ZONE
