"""Rollback rule: undo a round whose model is worse than the best one so far. Pure functions.

The comparison is with the best round, not with the one before, because many small steps down are a collapse too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RollbackRule:
    """Bounds of the rollback rule. A round is undone if accuracy or loss is outside of them, or not finite.

    Attributes:
        accuracy: Largest drop below the best accuracy so far; 0 for no bound.
        loss: Largest multiple of the lowest loss so far; 0 for no bound.
    """

    accuracy: float = 0.0
    loss: float = 0.0

    @property
    def on(self) -> bool:
        """True if accuracy or loss has a bound."""
        return bool(self.accuracy or self.loss)


NEVER = RollbackRule()


@dataclass(frozen=True)
class BestMetrics:
    """Highest accuracy and lowest loss of the rounds that were not undone so far; None before there is one."""

    accuracy: float | None = None
    loss: float | None = None

    def after(self, metrics: Mapping[str, float]) -> BestMetrics:
        """Return the best metrics after one more round with ``metrics``, of which ``accuracy`` and ``loss`` are used.

        Values that are not finite are ignored.
        """
        accuracies, losses = (
            [value for value in (known, metrics.get(name)) if value is not None and math.isfinite(value)]
            for name, known in (("accuracy", self.accuracy), ("loss", self.loss))
        )
        return BestMetrics(max(accuracies, default=None), min(losses, default=None))


def best_of(rounds: Iterable[Mapping[str, float | None]]) -> BestMetrics:
    """Return the highest accuracy and the lowest loss of several rounds' metrics. None and values that are not finite
    are ignored.
    """
    best = BestMetrics()
    for metrics in rounds:
        best = best.after({name: value for name, value in metrics.items() if value is not None})
    return best


def collapse(rule: RollbackRule, best: BestMetrics, metrics: Mapping[str, float]) -> str:
    """Return the reason why a round with these ``metrics`` must be undone; an empty text if its model is kept.

    Metrics that are not finite are a reason even if ``rule`` has no bounds.
    """
    for name in ("loss", "accuracy"):
        if not math.isfinite(metrics.get(name, 0.0)):
            return f"{name} is {metrics[name]}"
    accuracy, most = metrics.get("accuracy"), best.accuracy
    if rule.accuracy and accuracy is not None and most is not None and accuracy < most - rule.accuracy:
        return f"accuracy is {accuracy:.4g}, more than {rule.accuracy:g} below the best so far, {most:.4g}"
    loss, least = metrics.get("loss"), best.loss
    # A loss that may be 0 or below has no multiples.
    if rule.loss and loss is not None and least is not None and 0 < rule.loss * least < loss:
        return f"loss is {loss:.4g}, more than {rule.loss:g} times the lowest so far, {least:.4g}"
    return ""
