"""Memory of the values between kernels and delegates: one arena, planned when the program is written."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from edgefl.wire.tensors import Array

ALIGNMENT = 64
"""Of every value, in bytes: a cache line, and more than any kernel asks for."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Lifetime:
    """``size`` bytes that are needed from instruction ``first`` to instruction ``last``, both included."""

    size: int
    first: int
    last: int


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def planned(spans: Mapping[Key, Lifetime]) -> tuple[dict[Key, int], int]:
    """An offset for each span and the size of the arena: no two spans that meet in time overlap in memory.

    The largest span first, each in the smallest gap that fits among those already placed; of equals the earlier one.
    """
    order = sorted(spans, key=lambda key: (-spans[key].size, spans[key].first))
    lives = np.array([(spans[key].first, spans[key].last) for key in order], np.int64).reshape(-1, 2)
    taken = np.zeros_like(lives)  # (begin, end) of those that are placed
    for number, key in enumerate(order):
        size = aligned(spans[key].size)
        meeting = (lives[:number, 0] <= lives[number, 1]) & (lives[number, 0] <= lives[:number, 1])
        begin = _best_gap(taken[:number][meeting], size)
        taken[number] = begin, begin + size
    return dict(zip(order, taken[:, 0].tolist(), strict=True)), int(taken[:, 1].max(initial=0))


def _best_gap(taken: Array, size: int) -> int:
    """The beginning of the smallest gap between intervals (n, 2) that has room for ``size``, or behind them all."""
    taken = taken[taken[:, 0].argsort(kind="stable")]
    ends = np.concatenate([[0], np.maximum.accumulate(taken[:, 1])])
    gaps = taken[:, 0] - ends[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(ends[fitting[gaps[fitting].argmin()]] if len(fitting) else ends[-1])
