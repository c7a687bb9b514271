"""How good a model is, in words: the metric of its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.wire.metric_text import number


def shown(name: str, value: float, digits: int = 1) -> str:
    """``accuracy 81.2%``, ``perplexity 34.7``, ``mae 0.213``."""
    return f"{name} {number(name, value, digits)}"


def headline(told: Mapping[str, Any]) -> str:
    """The metric of the task in what the server told of a round or of a run; "" where nothing was evaluated."""
    name = told.get("metric") or "accuracy"
    value = told.get("metrics", {}).get(name, told.get(name))
    return "" if value is None else shown(name, value)
