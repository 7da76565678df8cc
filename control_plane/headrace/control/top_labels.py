"""Which names get a label of their own in metrics: the busiest few; all others share one.

A name keeps its label while it is among the busiest; when a clearly busier one takes its place, its series are given
up. So the number of series is bounded, however many names there are. Sans-io.
"""

from __future__ import annotations

OTHER = "other"

_CLEARLY = 2.0
"""How much busier a name must be to take another's label: two that are alike do not take turns."""

_TRACKED = 32
"""Names tracked for each label: one that is busy is soon found, and their number stays bounded."""


class TopLabels:
    """The labels of names.

    Args:
        labels_max: names with a label of their own.
    """

    def __init__(self, labels_max: int) -> None:
        self._labels_max = labels_max
        self._activity: dict[str, float] = {}
        self._labelled: set[str] = set()

    @property
    def labelled(self) -> frozenset[str]:
        """Names with a label of their own."""
        return frozenset(self._labelled)

    def label(self, name: str, amount: float = 1.0) -> str:
        """Count `amount` of activity of a name, and tell its label."""
        if name in self._activity:
            self._activity[name] += amount
        elif len(self._activity) < self._labels_max * _TRACKED:
            self._activity[name] = amount
        if name not in self._labelled and len(self._labelled) < self._labels_max and name in self._activity:
            self._labelled.add(name)
        return name if name in self._labelled else OTHER

    def rotate(self) -> tuple[str, ...]:
        """Give labels to the busier ones, and let what was count for half; call it now and then.

        Returns:
            Names that have lost their label: their series are to be dropped.
        """
        lost = []
        activity = self._activity
        waiting = sorted(activity.keys() - self._labelled, key=lambda name: (activity[name], name))
        held = sorted(self._labelled, key=lambda name: (activity.get(name, 0.0), name))
        for idle in held:
            if not waiting or activity[waiting[-1]] <= _CLEARLY * activity.get(idle, 0.0):
                break
            self._labelled.remove(idle)
            self._labelled.add(waiting.pop())
            lost.append(idle)
        self._activity = {name: value / 2 for name, value in activity.items() if value >= 1 or name in self._labelled}
        return tuple(lost)
