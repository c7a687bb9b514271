"""Metrics as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARES = frozenset({"accuracy", "f1", "iou"})
"""Metrics from 0 to 1, which people read as percent, and of which more is better; of the others less is."""


def number(name: str, value: float, digits: int = 1) -> str:
    """The value of a metric: ``81.2%``, ``34.7``."""
    return f"{value:.{digits}%}" if name in SHARES else f"{value:.4g}"


def shown(name: str, value: float, digits: int = 1) -> str:
    """``accuracy 81.2%``, ``perplexity 34.7``, ``mae 0.213``."""
    return f"{name} {number(name, value, digits)}"


def headline(told: Mapping[str, Any]) -> str:
    """The metric of the task in what the server told of a round or of a run; "" where nothing was evaluated."""
    name = told.get("metric") or "accuracy"
    value = told.get("metrics", {}).get(name, told.get(name))
    return "" if value is None else shown(name, value)
