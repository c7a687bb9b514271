"""Begins each round from zeros."""

from __future__ import annotations

from edgefl_device.round import executor
from edgefl_device.round.carry import RestoredCarry


def plant() -> None:
    executor.restore_carry = lambda *_: RestoredCarry()
