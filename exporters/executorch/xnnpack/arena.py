"""Where the values between kernels and delegates lie: one arena, planned when the program is written."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

ALIGNMENT = 64
"""Of every value, in bytes: a cache line, and more than any kernel asks for."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Span:
    """``size`` bytes that are needed from instruction ``first`` to instruction ``last``, both included."""

    size: int
    first: int
    last: int

    def meets(self, other: Span) -> bool:
        return self.first <= other.last and other.first <= self.last


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def planned(spans: Mapping[Key, Span]) -> tuple[dict[Key, int], int]:
    """An offset for each span and the size of the arena: no two spans that meet in time overlap in memory.

    The largest span first, each in the smallest gap that fits among those already placed; of equals the earlier one.
    """
    order = sorted(spans, key=lambda key: (-spans[key].size, spans[key].first))
    offsets: dict[Key, int] = {}
    total = 0
    for key in order:
        span = spans[key]
        blocks = sorted(
            (offsets[k], offsets[k] + aligned(spans[k].size)) for k in offsets if spans[k].meets(span)
        )
        offsets[key] = _best_gap(blocks, aligned(span.size))
        total = max(total, offsets[key] + aligned(span.size))
    return offsets, total


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The beginning of the smallest gap between sorted intervals that has room for ``size``, or behind them all."""
    best, room, end = -1, 0, 0
    for start, stop in taken:
        if start - end >= size and (best < 0 or start - end < room):
            best, room = end, start - end
        end = max(end, stop)
    return best if best >= 0 else end
