"""How many attempts a replica is given at a time, from the time that its steps take.

Why not a gradient: Envoy's and Netflix's gradient limits compare a latency with the least one ever seen, and take any
rise for a queue. With continuous batching a step takes longer with each sequence in it, by design: sixteen sequences
that each get a token in 40 ms are worth more than one that gets it in 12 ms. A gradient against the unloaded minimum
would throttle exactly what the batch is for. So this is AIMD against a target of the time per step:

    over the target     limit = limit x 0.8, once a window
    within it           limit = limit + 1, if the window was near the limit; a window below it shows nothing
    at 1 and still over load is not the cause: the target is eased until the limit rises again, so that a replica
                        that became slow for good is not left with a limit of 1

The target is set, or it is `tolerance` times the long-run median of windows in which all slots were busy: the replica
is compared with itself, when it was full. A limit never leaves 1 .. slots.

Sans-io: times are arguments, seconds. A sample costs O(1); a window sorts at most SAMPLES_MAX of them.
"""

from __future__ import annotations

import math

TARGET_MIN_S = 0.05
WINDOW_S = 1.0
WINDOW_SAMPLES_MIN = 8
"""A window lasts until it has so many."""
SAMPLES_MAX = 128
"""Kept of one window; newer ones replace the oldest."""
DECREASE = 0.8
NEAR = 0.5
"""A window whose busiest moment had less than this share of the limit says nothing of the limit."""
FULL = 0.9
"""Share of the slots from which on a window counts for the long-run median."""
LEARNING_WINDOWS = 8
MEDIAN_STEP = 0.02
"""The long-run median moves by this share in a window, so an hour's normal outlives a minute's trouble."""
EASE = 1.1
"""The target is eased by this factor a window at a limit of 1, and goes back in such steps."""


class ConcurrencyLimit:
    """The limit of one run of one replica.

    Args:
        slots: the most that it can be.
        target_s: seconds that a step may take; 0: `tolerance` times the long-run median.
        tolerance: see there; above 1.
    """

    __slots__ = (
        "_busiest",
        "_ease",
        "_limit",
        "_median",
        "_samples",
        "_seen",
        "_slots",
        "_target_s",
        "_tolerance",
        "_window_from",
        "_windows",
        "decreases",
    )

    def __init__(self, slots: int, *, target_s: float = 0.0, tolerance: float = 3.0) -> None:
        assert slots >= 0
        assert target_s >= 0
        assert tolerance > 1
        self._slots = max(slots, 1)
        self._target_s = target_s
        self._tolerance = tolerance
        self._limit = float(self._slots)
        self._ease = 1.0
        self._median = 0.0
        self._windows = 0
        self._samples: list[float] = []
        self._seen = 0
        self._busiest = 0
        self._window_from: float | None = None
        self.decreases = 0
        """Windows that were over the target."""

    @property
    def limit(self) -> int:
        """Attempts that may run at a time: 1 to the number of slots."""
        return max(1, math.floor(self._limit))

    @property
    def target_s(self) -> float:
        """What a step may take at present; infinite while nothing is known."""
        if self._target_s:
            return self._target_s * self._ease
        if self._windows < LEARNING_WINDOWS:
            return math.inf
        return max(self._median * self._tolerance, TARGET_MIN_S) * self._ease

    def observe(self, step_s: float, in_flight: int, now: float) -> bool:
        """A response of the engine arrived: its steps took `step_s` each, with `in_flight` attempts in the engine.

        Returns:
            Whether the limit changed.
        """
        if step_s < 0 or not math.isfinite(step_s):
            return False
        if self._window_from is None:
            self._window_from = now
        if len(self._samples) < SAMPLES_MAX:
            self._samples.append(step_s)
        else:
            self._samples[self._seen % SAMPLES_MAX] = step_s
        self._seen += 1
        self._busiest = max(self._busiest, in_flight)
        if now - self._window_from < WINDOW_S or self._seen < WINDOW_SAMPLES_MIN:
            return False
        before = self.limit
        self._close_window(sorted(self._samples)[len(self._samples) // 2])
        self._samples.clear()
        self._seen = self._busiest = 0
        self._window_from = None  # the next one begins with its first sample
        return self.limit != before

    def _close_window(self, median_s: float) -> None:
        if self._busiest < NEAR * self.limit:
            return
        target_s = self.target_s
        if self._busiest >= FULL * self._slots:
            self._learn(median_s)
        if median_s > target_s:
            self.decreases += 1
            if self.limit == 1:
                self._ease *= EASE
            self._limit = max(1.0, self._limit * DECREASE)
            return
        if median_s * self._ease <= target_s:  # without the ease too
            self._ease = max(1.0, self._ease / EASE)
        if self._busiest >= self.limit:
            self._limit = min(float(self._slots), self._limit + 1.0)

    def _learn(self, median_s: float) -> None:
        """Move the long-run median; the first windows count as they are."""
        self._windows += 1
        if self._windows <= LEARNING_WINDOWS:
            self._median += (median_s - self._median) / self._windows
        elif median_s > self._median:
            self._median *= 1 + MEDIAN_STEP
        else:
            self._median /= 1 + MEDIAN_STEP
