"""Says a decline once, though nobody acknowledges it."""

from __future__ import annotations

from edgefl_device.round.scheduler import RoundScheduler


def plant() -> None:
    RoundScheduler.declines = lambda self: []  # type: ignore[method-assign]
