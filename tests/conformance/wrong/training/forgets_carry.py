"""Begins each round from zeros."""

from __future__ import annotations

from device_runtime.round import work
from device_runtime.round.resume import TakenUp


def plant() -> None:
    work.take_up = lambda *_: TakenUp()
