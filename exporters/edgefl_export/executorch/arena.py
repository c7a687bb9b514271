"""Planner of a program's arena: an offset for each value, so that values share memory that they need at different times."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from edgefl.wire.tensors import Array

ALIGNMENT = 64
"""Alignment of every value in bytes: a cache line, and more than any kernel requires."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Lifetime:
    """Size of a value in bytes and the instructions, ``first`` to ``last`` inclusive, that need it."""

    size: int
    first: int
    last: int


def align(count: int) -> int:
    """Return ``count`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def plan_arena(spans: Mapping[Key, Lifetime]) -> tuple[dict[Key, int], int]:
    """Plan the memory of values so that values that are needed at the same time do not overlap.

    The largest value is placed first (among equals the earliest), each in the smallest gap that fits.

    Args:
        spans: size and lifetime of each value.

    Returns:
        Offset of each value in bytes, and the size of the whole memory.
    """
    order = sorted(spans, key=lambda key: (-spans[key].size, spans[key].first))
    lives = np.array([(spans[key].first, spans[key].last) for key in order], np.int64).reshape(-1, 2)
    taken = np.zeros_like(lives)  # (begin, end) of those that are placed
    for number, key in enumerate(order):
        size = align(spans[key].size)
        meeting = (lives[:number, 0] <= lives[number, 1]) & (lives[number, 0] <= lives[:number, 1])
        begin = _best_gap(taken[:number][meeting], size)
        taken[number] = begin, begin + size
    return dict(zip(order, taken[:, 0].tolist(), strict=True)), int(taken[:, 1].max(initial=0))


def _best_gap(taken: Array, size: int) -> int:
    """Return the begin of the smallest gap between the intervals ``taken`` (n, 2) that has ``size`` bytes, or the end
    of the last one.
    """
    taken = taken[taken[:, 0].argsort(kind="stable")]
    ends = np.concatenate([[0], np.maximum.accumulate(taken[:, 1])])
    gaps = taken[:, 0] - ends[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(ends[fitting[gaps[fitting].argmin()]] if len(fitting) else ends[-1])
