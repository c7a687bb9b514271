"""Exact sums of fixed-point integers over a flat model, computed by CPU threads. The GPU counterpart is
:mod:`edgefl_server.aggregate.cuda`.

A value v of an update becomes ``rint(float64(v) * factor)``, where factor is its weight times 2**fraction_bits.
Integers are added, so neither the engine, the number of threads nor the division into batches changes a bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from edgefl.system.memory import cores
from edgefl.wire.tensors import Array
from edgefl_server.aggregate.adders import (
    CheckedArrays,
    Chosen,
    Factors,
    UpdateBatch,
    addresses_of,
    loop_of,
    readable,
)
from edgefl_server.aggregate.scatter import (
    LENGTH,
    PART,
    TARGET,
    Floats,
    Integers,
    Layout,
    SectionBlocks,
    TierBlocks,
    stretch,
)

if TYPE_CHECKING:
    from edgefl_server.aggregate.blocks import Sink

Call = Callable[[], None]


def run_in_threads(calls: Sequence[Call], threads: int) -> None:
    """Run all ``calls`` on ``threads`` threads and return when all have finished. Calls must not depend on each other.

    Raises:
        Exception: The error of the first call that failed, after all calls have ended.
    """
    if threads == 1 or len(calls) < 2:
        for call in calls:
            call()
        return
    submitted = [_pool(threads).submit(call) for call in calls]
    wait(submitted)  # all of them: they know memory by its address, which somebody holds until here only
    for done in submitted:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the shared thread pool of this size. It is cached, because starting threads costs as much as scanning 1 MB."""
    return ThreadPoolExecutor(threads, thread_name_prefix="aggregate")


_SPANS = 4
"""Spans of blocks per thread, so that a thread that is slowed down handles fewer."""

_LEAST = 1 << 17
"""Number of values (entries times updates) below which threads cost more than they save."""

PartSums = Callable[[slice], Integers]
"""Function from a part of the model to its sums. The part begins at a multiple of
:data:`edgefl_server.aggregate.scatter.PART`. Several threads may call it. A thread's result is valid until its
next call."""


Merge = Callable[[slice, Floats, Floats], None]
"""Function ``(part, old, new)`` that writes the entries ``part`` of the new model to ``new``, from those of the old
one. The part begins at a multiple of :data:`edgefl_server.aggregate.scatter.PART`."""


@dataclass(frozen=True)
class ModelStep:
    """Computation of a new model from the old model and the sums of a round.

    The object must live until its calls have finished, because they hold only the memory address of the old model.

    Attributes:
        layout: Positions of the tensors in the flat model.
        old: Tensors of the old model.
        new: Output array [model]: float32, or float64 if a tensor of ``old`` is not float32.
        change: True if updates hold changes: the average is then added to the old model.
    """

    layout: Layout
    old: Mapping[str, Array]
    new: Floats
    change: bool

    def by_parts(self, merge: Merge) -> list[Call]:
        """Return one call per part of the model, for :func:`run_in_threads`. Nothing is computed before they run.

        Each calls ``merge(part, old, new)``: the part as a slice of the flat model, its entries of the old model, and
        its entries of the output array.
        """
        starts = range(0, self.layout.size, PART)
        return [partial(self._part, merge, slice(at, min(at + PART, self.layout.size))) for at in starts]

    def _part(self, merge: Merge, part: slice) -> None:
        old = stretch(self.layout, self.old, part).astype(self.new.dtype, copy=False)
        merge(part, old, self.new[part])

    @cached_property
    def tensors(self) -> list[Array]:
        """Return the tensors of the old model in layout order, contiguous and aligned for compiled loops."""
        return [readable(self.old[name]) for name in self.layout.offsets]


class Accumulator(Protocol):
    """Integer sums over a flat model (all its tensors in one array) of ``size`` entries.

    ``spare`` is a pool of memory that the caller takes new models from.
    """

    size: int
    spare: ArrayPool

    def add(self, pieces: TierBlocks, updates: Sequence[CheckedArrays], factors: Factors) -> None:
        """Add ``rint(float64(value) * factor)`` to the sum of each entry, for every value in ``updates``.

        Args:
            pieces: Layout that all ``updates`` share.
            updates: Checked updates.
            factors: Factor of each update, float64 [updates].
        """

    def by_parts(self, pieces: TierBlocks) -> bool:
        """Return True if updates of layout ``pieces`` can be passed to :meth:`sum_parts` directly.

        False if they must be added with :meth:`add` first.
        """

    def sum_parts(self, batches: Sequence[UpdateBatch]) -> PartSums:
        """Return a function that maps a slice of the model to its sums: those added so far plus ``batches``.

        The batches are summed one part at a time in the CPU cache. They do not become part of :meth:`sums`. Each of
        them must have a layout for which :meth:`by_parts` is True.
        """

    def plan_renewal(
        self, batches: Sequence[UpdateBatch], renewal: ModelStep, weights: Integers, scale: float
    ) -> list[Call]:
        """Return calls that add ``batches`` and write the new model in one pass, or an empty list if that is not
        possible.

        It is possible if ``batches`` is one batch of whole models and nothing was added before. The values equal
        those of :meth:`sum_parts` followed by :func:`edgefl_server.aggregate.blocks.mean`.

        Args:
            batches: Updates that were not passed to :meth:`add`.
            renewal: Old model and output array.
            weights: Total weight of each entry, int64 [model], or [1] if all are equal.
            scale: Fixed-point value of 1.0.
        """

    def sums(self) -> Integers:
        """Return the sums so far, int64 [size]. The caller must not change the array."""

    def take(self, sums: Integers) -> None:
        """Add ``sums``, int64 [size], which the method :meth:`sums` of another accumulator of the same round returned."""

    def reset(self) -> None:
        """Set all sums to zero and keep their memory, because adding to memory that was written before is faster."""


class CpuAccumulator:
    """Accumulator (integer sums over a flat model) on CPU threads, by the loops of
    :mod:`edgefl_server.aggregate.kernels`.

    ``threads`` 0 uses all cores.
    """

    def __init__(self, size: int, threads: int = 0) -> None:
        self.size = size
        self.spare = ArrayPool()
        self._sums = np.zeros(size, np.int64)
        self._fresh = False
        self._empty = True
        self._threads = threads or cores()

    def add(self, pieces: TierBlocks, updates: Sequence[CheckedArrays], factors: Factors) -> None:
        if not pieces.covering:
            self._clear_fresh()
        sink = _sink(pieces.index, pieces.model, self._fresh, self._sums)
        run_in_threads(self._calls(UpdateBatch(pieces, updates, factors), sink), self._threads)
        self._fresh = self._empty = False

    def by_parts(self, pieces: TierBlocks) -> bool:
        return pieces.by_parts

    def sum_parts(self, batches: Sequence[UpdateBatch]) -> PartSums:
        return _PartSums(None if self._fresh else self._sums, batches)

    def plan_renewal(
        self, batches: Sequence[UpdateBatch], renewal: ModelStep, weights: Integers, scale: float
    ) -> list[Call]:
        whole = len(batches) == 1 and batches[0].pieces.covering
        if not (whole and self._empty and renewal.new.dtype == np.float32):
            return []  # sums in memory make streams of their own, which are better walked through by parts
        pieces = batches[0].pieces
        sink = _sink(pieces.index, pieces.model, True, self._sums)._replace(
            new=renewal.new,
            old=addresses_of(renewal.tensors),
            starts=np.array([*renewal.layout.starts, renewal.layout.size], np.int64),
            weights=weights,
            scale=scale,
            change=renewal.change,
        )
        return self._calls(batches[0], sink)

    def sums(self) -> Integers:
        self._clear_fresh()
        return self._sums

    def take(self, sums: Integers) -> None:
        self._clear_fresh()
        self._sums += sums
        self._empty = False

    def reset(self) -> None:
        self._empty = True
        self._fresh = True  # the first updates then write over it, which spares a walk through memory

    def _clear_fresh(self) -> None:
        if self._fresh:
            self._sums.fill(0)
            self._fresh = False

    def _calls(self, batch: UpdateBatch, sink: Sink) -> list[Call]:
        works = [work for work in batch.pieces.works if len(work.blocks)]
        return [call for work in works for call in self._of(batch, work, sink)]

    def _of(self, batch: UpdateBatch, work: SectionBlocks, sink: Sink) -> Iterator[Call]:
        chosen, values = loop_of(batch, work), int(work.blocks[:, LENGTH].sum()) * len(batch.updates)
        for span in _spans(work, min(_SPANS * self._threads, 1 + values // _LEAST)):
            yield partial(chosen(span, work.blocks[span]), sink)


def _sink(index: Integers, size: int, fresh: bool, sums: Integers) -> Sink:
    from edgefl_server.aggregate.blocks import Sink

    nothing, nowhere = np.empty(0, np.float32), np.zeros(1, np.uint64)
    return Sink(index, size, fresh, sums, nothing, nowhere, _NO_INDEX, _NO_INDEX, 1.0, False)


class _PartSums:
    """Callable that returns the sums of one part (a slice) of the model, int64: those of ``known`` plus those of
    ``batches``.

    ``known`` None means zeros. A thread's result is valid until its next call.
    """

    def __init__(self, known: Integers | None, batches: Sequence[UpdateBatch]) -> None:
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
        """Return this thread's array for sums, int64 [PART]. Its content is overwritten by the next part."""
        if not hasattr(self._own, "sums"):
            self._own.sums = np.empty(PART, np.int64)
        scratch: Integers = self._own.sums
        return scratch


_NO_INDEX = np.zeros(1, np.int64)


def _add_here(
    chosen: Chosen, span: slice, work: SectionBlocks, start: int, sums: Integers, *, fresh: bool
) -> None:
    """Add some blocks of a section to ``sums``, the sums of one part of the model.

    Args:
        chosen: Result of :func:`~edgefl_server.aggregate.adders.loop_of` for the section.
        span: Slice of the section's blocks to add.
        work: Blocks of the section.
        start: Position in the flat model of the first entry of ``sums``.
        sums: Output, int64.
        fresh: True to overwrite the content of ``sums``.
    """
    blocks = work.blocks[span].copy()
    blocks[:, TARGET] -= start
    chosen(span, blocks)(_sink(_NO_INDEX, sums.size, fresh, sums))


def _spans(work: SectionBlocks, count: int) -> list[slice]:
    """Return at most ``count`` slices that divide the blocks (stretches of entries) of ``work`` among threads, in
    order.

    Each has about equally many entries.
    """
    ends = np.cumsum(work.blocks[:, LENGTH])
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    edges = np.unique([0, *edges.tolist(), len(ends)])
    return [slice(first, stop) for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


_MOST_BYTES = 128 << 20
"""Largest array whose memory is kept for reuse."""

_KEPT = 2
"""Number of arrays whose memory is kept: the one in use, and the one before."""


class ArrayPool:
    """Source of uninitialized arrays that reuses the memory of earlier arrays.

    Memory is reused once neither the array nor a view of it (a memoryview, a tensor) exists any more. Not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[Any]]]] = []

    def array(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialized array [size] of ``dtype``."""
        nbytes = size * np.dtype(dtype).itemsize
        if not 0 < nbytes <= _MOST_BYTES:
            return np.empty(size, dtype)
        memory = self._free(nbytes)
        # Views of views have this array for their base, and not the memory: numpy goes no further than to what is no array.
        found: npt.NDArray[Any] = np.frombuffer(memory.data, dtype)
        self._kept = [*self._kept[-_KEPT + 1 :], (memory, weakref.ref(found))]
        return found

    def _free(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` of memory: that of an earlier array if no one uses it any more, else new memory."""
        for number, (memory, holder) in enumerate(self._kept):
            if holder() is None and memory.nbytes == nbytes:
                del self._kept[number]
                return memory
        return np.empty(nbytes, np.uint8)
