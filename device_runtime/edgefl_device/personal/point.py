"""What a model is worth after some steps: its loss, and the metrics of its task."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgefl.wire.metrics import LOSS, METRICS, Sums, measured

_UNTOLD = ("accuracy",)
"""What bundles are measured by that do not say it."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Mean loss and the metrics of the task on the query samples after ``steps`` steps, the headline first; no metric
    where there is but the loss."""

    steps: int
    loss: float
    metrics: dict[str, float]

    @property
    def metric(self) -> str:
        """The name of the headline."""
        return next(iter(self.metrics), LOSS)

    def value(self, metric: str) -> float:
        """That of a metric, or of the loss."""
        return self.loss if metric == LOSS else self.metrics[metric]


def point_of(steps: int, names: Sequence[str], sums: Sums) -> Point:
    """From the sums of all query samples; ``names`` are those that an evaluation's graph tells."""
    known = [name for name in names or _UNTOLD if name in METRICS]
    found = measured(known, sums)
    return Point(steps=steps, loss=found.pop(LOSS), metrics=found)
