"""Curves of a federation's model over its rounds, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edgefl.analysis import charts
from edgefl.analysis.charts import COUNT, FREE, SHARE
from edgefl.simulator.results import RoundRow
from edgefl.wire.text import SHARES

Line = list[tuple[float, float]]
_CHANCE = "chance"


def curves(rows: Sequence[RoundRow], title: str, classes: int = 0) -> Mapping[str, str]:
    """Draw charts of a run over its rounds: its metric on the test set and on held-out rows of devices, and its losses.

    Args:
        rows: the rounds, in order.
        title: title of the run.
        classes: number of classes, for a line at the accuracy of random guesses; 0 for no such line.

    Returns:
        SVG text by the chart's name. A chart without a finite number is left out.
    """
    metric = rows[-1].metric if rows else ""
    found = [row.evaluation.devices if row.evaluation else None for row in rows]
    shown = {
        metric: {
            metric: _line(rows, [row.metrics.get(metric, row.accuracy) for row in rows]),
            "devices": _line(rows, [each.metrics.get(metric) if each else None for each in found]),
            "median device": _line(rows, [each.median.get(metric) if each else None for each in found]),
            "worst decile": _line(rows, [each.worst_decile.get(metric) if each else None for each in found]),
        },
        "loss": {
            "test set": _line(rows, [row.loss for row in rows]),
            "training, mean over clients": _line(rows, [row.train_loss for row in rows]),
        },
    }
    drawn = {}
    for name, series in shown.items():
        lines = {label: line for label, line in series.items() if line}
        if lines:
            span = SHARE if name in SHARES else FREE
            if name == "accuracy" and classes > 1:
                lines[_CHANCE] = [(0.0, 1 / classes), (float(rows[-1].round), 1 / classes)]
            drawn[name] = charts.line_chart(
                lines,
                title=f"{title}: {name}",
                x="round",
                y=name,
                x_span=COUNT,
                y_span=span,
                dashed=[_CHANCE],
            )
    return drawn


def _line(rows: Sequence[RoundRow], values: Sequence[float | None]) -> Line:
    return [
        (float(row.round), value)
        for row, value in zip(rows, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
