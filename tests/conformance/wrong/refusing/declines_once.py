"""Says a decline once, though nobody acknowledges it."""

from __future__ import annotations

from edgefl_device.round.desk import RoundDesk


def plant() -> None:
    RoundDesk.declare = lambda self: None  # type: ignore[method-assign]
