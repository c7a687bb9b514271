"""Says a decline once, though nobody acknowledges it."""

from __future__ import annotations

from device_runtime.round.desk import RoundDesk


def plant() -> None:
    RoundDesk.declare = lambda self: None  # type: ignore[method-assign]
