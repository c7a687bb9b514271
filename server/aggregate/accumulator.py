"""Exact sums of fixed-point integers over a flat model, on the processor's cores; :mod:`server.aggregate.cuda` has
the other engine.

A value v of an update becomes ``rint(float64(v) * factor)``, factor being its weight times 2**fraction_bits, and
integers are added; so neither the engine, the number of threads nor the batch that an update came in changes a bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from edgefl.system.cores import cores
from server.aggregate.adders import Checked, Chosen, Factors, Waiting, loop_of
from server.aggregate.scatter import LENGTH, PART, TARGET, Integers, Pieces, Work
from server.aggregate.threads import Call, run

_SPANS = 4
"""Spans of blocks per thread: one that is slowed down takes fewer."""

_LEAST = 1 << 17
"""Entries times updates below which starting threads costs more than they save."""

Ended = Callable[[slice], Integers]
"""The final sums of a part of the model, from a multiple of :data:`server.aggregate.scatter.PART` to the next: several
threads may ask, and each may read what it was given until it asks again."""


class Accumulator(Protocol):
    """Integer sums over a flat model of ``size`` entries."""

    size: int

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: Factors) -> None:
        """Add ``rint(float64(value) * factor)`` of each entry of the updates, all of which have these ``pieces``."""

    def by_parts(self, pieces: Pieces) -> bool:
        """Whether updates with these pieces need not be added before :meth:`ended`."""

    def ended(self, batches: Sequence[Waiting]) -> Ended:
        """The sums so far and ``batches`` (:meth:`by_parts`) beside them, which are in what it gives alone: their sums
        are made a part at a time, in the cache, and never lie in memory."""

    def sums(self) -> Integers:
        """The sums so far, int64 [size]; not to be changed."""

    def take(self, sums: Integers) -> None:
        """Add the ``sums`` of another one, int64 [size]."""

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

    def add(self, pieces: Pieces, updates: Sequence[Checked], factors: Factors) -> None:
        if not pieces.covering:
            self._zeroed()
        batch = Waiting(pieces, updates, factors)
        calls = [call for work in pieces.works if len(work.blocks) for call in self._calls(batch, work)]
        run(calls, self._threads if pieces.size * len(updates) >= _LEAST else 1)
        self._fresh = False

    def by_parts(self, pieces: Pieces) -> bool:
        return pieces.by_parts

    def ended(self, batches: Sequence[Waiting]) -> Ended:
        return _Parts(None if self._fresh else self._sums, batches)

    def sums(self) -> Integers:
        self._zeroed()
        return self._sums

    def take(self, sums: Integers) -> None:
        self._zeroed()
        self._sums += sums

    def reset(self) -> None:
        self._fresh = True  # the first updates then write over it, which spares a walk through memory

    def _zeroed(self) -> None:
        if self._fresh:
            self._sums.fill(0)
            self._fresh = False

    def _calls(self, batch: Waiting, work: Work) -> Iterator[Call]:
        rest = (batch.pieces.index, batch.pieces.model, self._fresh, self._sums)
        chosen = loop_of(batch, work)
        for span in _spans(work, _SPANS * self._threads):
            yield partial(chosen(span, work.blocks[span]), *rest)


class _Parts:
    """The sums of one part after the other: ``known`` (None: zeros) and those of ``batches``."""

    def __init__(self, known: Integers | None, batches: Sequence[Waiting]) -> None:
        batches = sorted(batches, key=lambda batch: not batch.pieces.covering)
        self._known = known
        self._covered = bool(batches) and batches[0].pieces.covering
        self._works = [
            (number, work, edges, loop_of(batch, work))
            for number, batch in enumerate(batches)
            for work, edges in zip(batch.pieces.works, batch.pieces.edges, strict=True)
            if len(work.blocks)
        ]
        self._own = threading.local()

    def __call__(self, part: slice) -> Integers:
        if self._known is not None and not self._works:
            return self._known[part]
        sums = self._scratch()[: part.stop - part.start]
        fresh = self._known is None and self._covered
        if not fresh:
            sums[:] = 0 if self._known is None else self._known[part]
        for number, work, edges, chosen in self._works:
            span = slice(*edges[part.start // PART :][:2].tolist())
            if span.start < span.stop:
                _add_here(chosen, span, work, part.start, sums, fresh=fresh and number == 0)
        return sums

    def _scratch(self) -> Integers:
        """Of this thread, for all parts."""
        if not hasattr(self._own, "sums"):
            self._own.sums = np.empty(PART, np.int64)
        scratch: Integers = self._own.sums
        return scratch


_NO_INDEX = np.zeros(1, np.int64)


def _add_here(chosen: Chosen, span: slice, work: Work, start: int, sums: Integers, *, fresh: bool) -> None:
    """Add the blocks ``span`` of a section to ``sums``, the first of which is that of entry ``start`` of the model."""
    blocks = work.blocks[span].copy()
    blocks[:, TARGET] -= start
    chosen(span, blocks)(_NO_INDEX, sums.size, fresh, sums)


def _spans(work: Work, count: int) -> list[slice]:
    """Consecutive blocks, about equally many entries in each span."""
    ends = np.cumsum(work.blocks[:, LENGTH])
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    edges = np.unique([0, *edges.tolist(), len(ends)])
    return [slice(first, stop) for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
