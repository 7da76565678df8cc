"""What decisions compare: the totals of `headrace.control.scores.score` for a few replicas at once, without the parts.

It is on the path of every request, so what the replicas of a revision share is read once, and of each one only the flat
record of its standing. tests/control/test_costs.py holds it against the scores that are explained.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.control.filters import Question
from headrace.control.load_view import LoadView, Standing
from headrace.control.prefix_index import PrefixIndex
from headrace.control.scores import AFFINITY, AFFINITY_S, REFUSAL_S, SHARING, spread_s, wait_s
from headrace.control.slow_start import SlowStart


def costs(
    sample: Sequence[Standing], question: Question, loads: LoadView, prefixes: PrefixIndex, slow_start: SlowStart
) -> list[float]:
    """The total for each of a sample of one revision's replicas, in seconds; lower is better."""
    habits, demand, home, failed, now = sample[0].habits, question.demand, question.home, question.failed, question.now
    service_s, usual, usual_rate = habits.service_s, habits.others_per_slot, habits.prefill_tokens_per_s
    half_life_s, priority, blocks = loads.half_life_s(habits), demand.priority, demand.blocks
    prompt_tokens = demand.prompt_size if demand.is_tokens else demand.prompt_size / habits.bytes_per_token
    keepers = prefixes.keepers(blocks)
    is_spread, is_ramping = failed or len(habits.slots_by_zone) > 1, slow_start.since_by_name
    found = []
    for standing in sample:
        width = standing.width
        age_s = now - standing.reported_at
        weight = 0.5 ** (age_s / half_life_s) if age_s > 0.0 else 1.0
        attempts = standing.own + weight * standing.theirs + (1.0 - weight) * usual * width
        queued = attempts + 1.0 - width
        total = service_s * (SHARING * attempts + (queued if queued > 0.0 else 0.0)) / width
        if standing.queue_wait_s is not None:
            total += weight * (standing.queue_wait_s - service_s * standing.queued_per_slot)
            total = total if total > 0.0 else 0.0
        if standing.admits_from > priority:
            total += weight * REFUSAL_S
        cached_share = 0.0
        if standing.name in keepers:
            cached_share = prefixes.believed(standing.name, blocks) * demand.block_size / demand.prompt_size
        to_compute = prompt_tokens * (1.0 - cached_share)
        total += to_compute / (standing.prefill_tokens_per_s or usual_rate)
        if standing.kv_cells:
            missing = to_compute + demand.output_tokens - standing.kv_free
            if missing > 0.0:
                total += weight * service_s * min(1.0, missing / standing.kv_cells)
        if is_spread:
            total += spread_s(standing, habits, failed)
        if is_ramping and (ramp := slow_start.weight(standing.name, now)) < 1.0:
            total += wait_s(attempts, max(1.0, width * ramp), service_s) - wait_s(attempts, width, service_s)
        if home and standing.name == home:
            prefill = prompt_tokens / (standing.prefill_tokens_per_s or usual_rate)
            total -= AFFINITY_S + (0.0 if prefill * cached_share else AFFINITY * prefill)
        found.append(total)
    return found
