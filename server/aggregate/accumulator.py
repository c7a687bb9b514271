"""Exact sums of fixed-point integers over a flat model, on the processor's cores; :mod:`server.aggregate.cuda` has
the other engine.

A value v of an update becomes ``rint(float64(v) * factor)``, factor being its weight times 2**fraction_bits, and
integers are added; so neither the engine, the number of threads nor the batch that an update came in changes a bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import widen
from edgefl.wire.update.form import Codes, Sparse, Values
from server.aggregate import kernels, scans
from server.aggregate.kernels import FIRST, LENGTH
from server.aggregate.scatter import Integers, Pieces, Work

_SPANS = 4
"""Spans of blocks per thread: one that is slowed down takes fewer."""

_LEAST = 1 << 17
"""Entries times updates below which starting threads costs more than they save."""

_Call = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Checked:
    """A checked update: its arrays in the order of ``pieces.sources`` (C order, aligned), not decoded.

    Nothing is copied: the arrays must not change until they have been added.
    """

    pieces: Pieces
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by name, as they travelled."""
        return dict(zip(self.pieces.sources, self.arrays, strict=True))


class Accumulator(Protocol):
    """Integer sums over a flat model of ``size`` entries."""

    size: int

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: npt.NDArray[np.float64]) -> None:
        """Add ``rint(float64(value) * factor)`` of each entry of the updates, all of which have these ``pieces``."""

    def sums(self) -> Integers:
        """The sums so far, int64 [size]; not to be changed."""

    def reset(self) -> None:
        """Back to zero: memory that was written to before is the faster one to add into."""


class CpuAccumulator:
    """Checked updates of any form, added by :mod:`server.aggregate.kernels` on ``threads`` cores (0: as many as
    there are)."""

    def __init__(self, size: int, threads: int = 0) -> None:
        self.size = size
        self._sums = np.zeros(size, np.int64)
        self._fresh = False
        self._threads = threads or cores()

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: npt.NDArray[np.float64]) -> None:
        if not pieces.covering:
            self._zeroed()
        calls = [
            call
            for work in pieces.works
            if len(work.blocks)
            for call in self._calls(pieces, work, updates, factors)
        ]
        run(calls, self._threads if pieces.size * len(updates) >= _LEAST else 1)
        self._fresh = False

    def sums(self) -> Integers:
        self._zeroed()
        return self._sums

    def reset(self) -> None:
        self._fresh = True  # the first updates then write over it, which spares a walk through memory

    def _zeroed(self) -> None:
        if self._fresh:
            self._sums.fill(0)
            self._fresh = False

    def _calls(
        self, pieces: Pieces, work: Work, updates: Sequence[Checked], factors: npt.NDArray[np.float64]
    ) -> Iterator[_Call]:
        addresses = np.array([[array.ctypes.data for array in u.arrays] for u in updates], np.uint64)
        rest = (pieces.index, pieces.model, self._fresh, self._sums)
        spans = _spans(work, _SPANS * self._threads)
        match work.encoding:
            case Codes(bits=bits):
                values = code_values(pieces, work, updates, factors)
                if bits == 1:
                    low, high = values[..., 0].copy(), values[..., 1].copy()
                    calls = [partial(kernels.add_bits, addresses, low, high, work.blocks[s]) for s in spans]
                else:
                    calls = [
                        partial(kernels.add_codes, addresses, bits, values, work.blocks[s]) for s in spans
                    ]
            case Values(dtype="float32"):
                calls = [partial(kernels.add_floats, addresses, factors, work.blocks[s]) for s in spans]
            case Values(dtype=dtype):
                wide = _widened(dtype)
                calls = [partial(kernels.add_halves, addresses, wide, factors, work.blocks[s]) for s in spans]
            case Sparse():
                source, starts = pieces.sources.index("values"), _starts(pieces, work, updates)
                calls = [
                    partial(kernels.add_kept, addresses, source, starts[:, s].copy(), factors, work.blocks[s])
                    for s in spans
                ]
        return (partial(call, *rest) for call in calls)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(calls: Sequence[_Call], threads: int) -> None:
    """Make all ``calls`` on so many threads. They must not depend on each other."""
    if threads == 1 or len(calls) < 2:
        for call in calls:
            call()
        return
    for done in [_pool(threads).submit(call) for call in calls]:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that stay: starting some takes as long as looking through a megabyte."""
    return ThreadPoolExecutor(threads, thread_name_prefix="aggregate")


def _spans(work: Work, count: int) -> list[slice]:
    """Consecutive blocks, about equally many entries in each span."""
    ends = np.cumsum(work.blocks[:, LENGTH])
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    edges = np.unique([0, *edges.tolist(), len(ends)])
    return [slice(first, stop) for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def code_values(
    pieces: Pieces, work: Work, updates: Sequence[Checked], factors: npt.NDArray[np.float64]
) -> Integers:
    """What each code adds, int64 [updates, rows, 2**bits]: the float32 scale times the level, then times the factor."""
    assert isinstance(work.encoding, Codes)
    levels = np.asarray(work.encoding.levels, np.float32)
    if work.encoding.scale is None:
        part, source = slice(work.scale, work.scale + work.rows), pieces.sources.index("scales")
        scales = np.stack([update.arrays[source][part] for update in updates])
    else:
        scales = np.full((len(updates), 1), work.encoding.scale, np.float32)
    values = scales[:, :, None] * levels
    return np.rint(values.astype(np.float64) * factors[:, None, None]).astype(np.int64)


def _starts(pieces: Pieces, work: Work, updates: Sequence[Checked]) -> Integers:
    """Where in ``values`` each block of a sparse section begins, int64 [updates, blocks]: blocks go through the mask."""
    source = pieces.sources.index("mask")
    counts = np.empty((len(updates), len(work.blocks)), np.int64)
    firsts, lengths = work.blocks[:, FIRST].copy(), work.blocks[:, LENGTH].copy()
    for update, row in zip(updates, counts, strict=True):
        scans.count_bits(update.arrays[source].ctypes.data, firsts, lengths, row)
    return work.kept + np.cumsum(counts, axis=1) - counts


@cache
def _widened(dtype: str) -> npt.NDArray[np.float32]:
    """float32 [65536]: the value of each pattern of 16 bits. The patterns of NaN are there too, and never looked up."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        return widen(patterns if dtype == "bfloat16" else patterns.view(np.float16))
