"""Show a run in a notebook: its progress, and its rounds as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from edgefl.wire.text import headline_metric

MOST_ROUNDS = 12


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def print_round(news: Any) -> None:
    """Print a line for a round that ended: news of a run, or a row of a simulation."""
    told = getattr(news, "event", None) or msgspec.to_builtins(news)
    if told.get("event", "roundclosed") != "roundclosed" or "reports" not in told:
        return
    print(
        f"round {told['round']}: {headline_metric(told) or 'not evaluated'}, {told['reports']} reports",
        flush=True,
    )


def rounds_shown(history: Iterable[Any]) -> list[dict[str, object]]:
    """Return the last rounds of a run or a simulation as rows of a table."""
    return [
        {
            "round": row["round"],
            "metric": headline_metric(row) or "not evaluated",
            "training loss": "" if row["train_loss"] is None else f"{row['train_loss']:.4g}",
            "reports": row["reports"],
        }
        for row in map(msgspec.to_builtins, list(history)[-MOST_ROUNDS:])
    ]
