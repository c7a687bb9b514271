"""What an arm of FedBAT's entries tells: accuracy of the last rounds, and what was sent for it."""

from __future__ import annotations

from edgefl.api.simulate import Simulation
from edgefl.papers.entry import Found

LAST = 5
"""Rounds whose mean counts: the paper does not say which it reports (fedbat.md 4.3)."""


def measured(simulation: Simulation) -> Found:
    """Figures ``accuracy`` (mean of the last :data:`LAST` rounds), ``best``, ``up_kb`` (of one device in one round, headers
    included), ``ratio`` (float32 bytes over those) and ``up_mb`` (of all). Lines ``accuracy`` and ``loss`` by round, and
    ``sent``: accuracy by megabytes that all devices had sent."""
    rows = simulation.history
    accuracies = [(row, row.accuracy) for row in rows if row.accuracy is not None]
    last = [value for _, value in accuracies[-LAST:]]
    sent, up = {}, 0
    for row in rows:
        up += row.up_bytes
        sent[row.round] = up / 1e6
    reports = max(1, sum(row.reports for row in rows))
    return Found(
        {
            "accuracy": sum(last) / len(last),
            "best": max(value for _, value in accuracies),
            "up_kb": up / reports / 1e3,
            "ratio": sum(row.up_float32_bytes for row in rows) / max(1, up),
            "up_mb": up / 1e6,
        },
        {
            "accuracy": [(float(row.round), value) for row, value in accuracies],
            "sent": [(sent[row.round], value) for row, value in accuracies],
            "loss": [(float(row.round), row.loss) for row in rows if row.loss is not None],
        },
    )
