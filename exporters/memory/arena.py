"""onnxruntime's memory arena, run on sizes alone: which of its pages a sequence of requests touches.

Its rules: requests are rounded to 256 bytes and take the smallest free chunk that holds them, which is split where at
least half would be left over; freed neighbours merge; where nothing fits, a new region twice the size of the last one
is taken. Pages are never given back, so what was touched once stays resident.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

PAGE = 4096
_ALIGN = 256
_FIRST_REGION = 1 << 20
_LARGEST_GROWTH = 1 << 30
_LARGEST_LEFTOVER = 128 << 20


@dataclass
class _Chunk:
    size: int
    used: bool
    before: int | None  # addresses of the neighbours in the same region
    after: int | None


class Arena:
    """Addresses count from 0 through all regions, in the order in which they were taken."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self._free: list[tuple[int, int]] = []  # (size, address), ascending
        self._end = 0
        self._region = _FIRST_REGION
        self._touched = np.zeros(0, np.bool_)

    @property
    def touched(self) -> int:
        """Bytes of all pages that some request has covered."""
        return int(self._touched.sum()) * PAGE

    def take(self, count: int) -> int:
        """The address of ``count`` bytes."""
        rounded = max(_ALIGN, -(-count // _ALIGN) * _ALIGN)
        place = bisect.bisect_left(self._free, (rounded, -1))
        if place == len(self._free):
            self._grow(rounded)
            place = bisect.bisect_left(self._free, (rounded, -1))
        size, address = self._free.pop(place)
        chunk = self._chunks[address]
        if size >= 2 * rounded or size - rounded >= _LARGEST_LEFTOVER:
            rest = address + rounded
            self._chunks[rest] = _Chunk(size - rounded, False, address, chunk.after)
            if chunk.after is not None:
                self._chunks[chunk.after].before = rest
            chunk.size, chunk.after = rounded, rest
            bisect.insort(self._free, (size - rounded, rest))
        chunk.used = True
        self._touched[address // PAGE : -(-(address + count) // PAGE)] = True
        return address

    def give(self, address: int) -> None:
        """Free what :meth:`take` returned."""
        self._chunks[address].used = False
        after, before = self._chunks[address].after, self._chunks[address].before
        if after is not None and not self._chunks[after].used:
            self._forget(after)
            self._merge(address, after)
        if before is not None and not self._chunks[before].used:
            self._forget(before)
            self._merge(before, address)
            address = before
        bisect.insort(self._free, (self._chunks[address].size, address))

    def _forget(self, address: int) -> None:
        """Take a free chunk off the list."""
        del self._free[bisect.bisect_left(self._free, (self._chunks[address].size, address))]

    def _merge(self, left: int, right: int) -> None:
        gone = self._chunks.pop(right)
        self._chunks[left].size += gone.size
        self._chunks[left].after = gone.after
        if gone.after is not None:
            self._chunks[gone.after].before = left

    def _grow(self, rounded: int) -> None:
        enough = rounded <= self._region
        while rounded > self._region:
            self._region *= 2
        self._chunks[self._end] = _Chunk(self._region, False, None, None)
        bisect.insort(self._free, (self._region, self._end))
        self._end += self._region
        self._touched = np.concatenate([self._touched, np.zeros(self._region // PAGE, np.bool_)])
        if enough:
            self._region = min(2 * self._region, _LARGEST_GROWTH)
