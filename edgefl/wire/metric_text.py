"""Metrics as people read them."""

from __future__ import annotations

SHARES = frozenset({"accuracy", "f1", "iou"})
"""Metrics from 0 to 1, which people read as percent, and of which more is better; of the others less is."""


def number(name: str, value: float, digits: int = 1) -> str:
    """The value of a metric: ``81.2%``, ``34.7``."""
    return f"{value:.{digits}%}" if name in SHARES else f"{value:.4g}"
