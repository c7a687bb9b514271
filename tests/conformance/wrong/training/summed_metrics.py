"""Sends the sums of its metrics in place of their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_runtime.round.runner import RoundRunner


def plant() -> None:
    def sums(self: RoundRunner, found: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
        return dict(found)

    RoundRunner._means = sums  # type: ignore[method-assign]
