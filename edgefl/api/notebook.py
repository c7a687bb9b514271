"""Progress in notebooks, which otherwise show nothing of a run until its end."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from edgefl.wire.metric_text import headline


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def print_round(news: Any) -> None:
    """Print a line for a round that ended: news of a run, or a row of a simulation."""
    told = getattr(news, "event", None) or msgspec.to_builtins(news)
    if told.get("event", "roundclosed") != "roundclosed" or "reports" not in told:
        return
    print(
        f"round {told['round']}: {headline(told) or 'not evaluated'}, {told['reports']} reports", flush=True
    )
