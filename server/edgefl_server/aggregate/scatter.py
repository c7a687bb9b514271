"""Positions of a packed update's entries in the flat model: compiled once per tier into arrays that kernels read.

An update's tensors are cut into *blocks* of at most :data:`BLOCK` entries. The entries of a block lie one after the
other in the update and share a scale. They go to neighbouring entries of one part of the model (:data:`PART`), or to
positions listed in ``index``. Regions name no entry twice, so no two blocks write the same place and
threads need no locks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from edgefl.errors import ConfigError
from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import Positions, Region, local_shape, pieces
from edgefl.wire.tensors import Array
from edgefl.wire.update.form import DENSE, CodeEncoding, Encoding, FloatEncoding, Form, SparseEncoding

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]
Stretches = tuple[Integers, npt.NDArray[np.uint64], Integers]
"""Stretches of arrays of one dtype: indices of the arrays, byte offsets in them, and numbers of values."""

BLOCK = 8192
"""Largest number of entries of a block, a multiple of 8: its sums and its clients' bits stay in the cache."""

FIRST, LENGTH, SOURCE, ROW, TARGET = range(5)
"""Columns of a block: its first bit (codes, masks) or element (floats) in its array, entries, number of its array, row of
its scale, and first entry in the model; ``layout.size + i`` stands for the positions from ``index[i]`` on.

After a change of these or of :data:`BLOCK`, delete the ``__pycache__`` folder of the server
(:mod:`edgefl_server.aggregate.native` says why).
"""

PART = 1 << 17
"""Number of entries of a part of the model. Its sums nearly stay in the cache of one core."""

_STRETCH = 1 << 18
"""Largest number of values that a thread checks at a time."""

_SHORT = 64  # where slices leave stretches shorter than this, on average, an index costs less than blocks


@dataclass(frozen=True)
class Layout:
    """Positions of a model's tensors in one flat array, in which they follow each other sorted by name.

    Attributes:
        shapes: Shape of each tensor, by name.
        offsets: First entry of each tensor in the flat array, by name.
        size: Number of entries of all tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    size: int

    @cached_property
    def starts(self) -> list[int]:
        """Position of each tensor's first entry in the flat array, in the order of the tensors' names."""
        return list(self.offsets.values())

    @cached_property
    def names(self) -> list[str]:
        """Names of the tensors in the order in which they follow each other."""
        return list(self.offsets)


def layout_of(weights: Mapping[str, Array]) -> Layout:
    """Return the layout of a model's tensors.

    Raises:
        TypeError: If a tensor is not floating point.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    offsets: dict[str, int] = {}
    size = 0
    for name in sorted(weights):
        if not np.issubdtype(weights[name].dtype, np.floating):
            raise TypeError(f"{name} is {weights[name].dtype}; only floating-point tensors can be averaged")
        shapes[name], offsets[name] = weights[name].shape, size
        size += weights[name].size
    return Layout(shapes, offsets, size)


def flatten(layout: Layout, weights: Mapping[str, Array]) -> Floats:
    """Return a copy of ``weights`` as one flat array, in the order of ``layout``."""
    parts = [weights[name].reshape(-1) for name in layout.offsets]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def stretch(layout: Layout, weights: Mapping[str, Array], part: slice) -> Floats:
    """Return the entries ``part`` (a slice of the flat model) of ``weights``. It is a view if they lie in one tensor,
    else a copy.
    """
    first, last = bisect_right(layout.starts, part.start) - 1, bisect_left(layout.starts, part.stop)
    parts = [
        weights[name].reshape(-1)[max(0, part.start - at) : part.stop - at]
        for name, at in zip(layout.names[first:last], layout.starts[first:last], strict=True)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class SectionBlocks:
    """Blocks of one section, and the encoding of their entries. A section is a group of tensors with one encoding.

    Attributes:
        encoding: Encoding of the section.
        blocks: Blocks, int64 [blocks, 5], with the columns FIRST, LENGTH, SOURCE, ROW and TARGET.
        scale: Index of the section's first scale in ``scales``.
        rows: Number of its scales.
        kept: Index of the first value of a sparse section in ``values``.
    """

    encoding: Encoding
    blocks: Integers
    scale: int = 0
    rows: int = 1
    kept: int = 0


@dataclass(frozen=True, eq=False)
class TierBlocks:
    """Compiled layout of a tier's updates: for every entry its encoding and its position in the flat global model.

    Entries are grouped in blocks (stretches of at most :data:`BLOCK` entries), which are grouped by section.

    Attributes:
        form: Encoding of the updates.
        regions: Positions of the tensors in the global model, by local name.
        shapes: Shapes of the update's tensors, by local name.
        sources: Names of the encoded arrays, in the order of the SOURCE column.
        works: Blocks by section, a group of tensors with one encoding.
        index: Model positions of scattered entries.
        size: Entries of an update.
        model: Entries of the global model.
    """

    form: Form
    regions: Mapping[str, Region]
    shapes: Mapping[str, tuple[int, ...]]
    sources: tuple[str, ...]
    works: tuple[SectionBlocks, ...]
    index: Integers
    size: int
    model: int

    @cached_property
    def entries(self) -> dict[str, int]:
        """Number of entries of each tensor of the update, by local name."""
        return {name: math.prod(shape) for name, shape in self.shapes.items()}

    @cached_property
    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Expected (dtype, shape) of each encoded array of an update, by name."""
        if not self.form.sections:
            return {name: ("float32", shape) for name, shape in self.shapes.items()}
        arrays = self.form.arrays(self.entries)
        return {name: (dtype, (length,)) for name, (dtype, length) in arrays.items()}

    @cached_property
    def blocks(self) -> Integers:
        """Blocks (stretches of at most :data:`BLOCK` entries) of all sections, int64 [blocks, 5]."""
        return np.concatenate([work.blocks for work in self.works]) if self.works else _no_blocks()

    @cached_property
    def whole(self) -> bool:
        """Return True if updates hold every entry of the model."""
        return self.size == self.model

    @cached_property
    def covering(self) -> bool:
        """Return True if updates hold every entry of the model in contiguous stretches, so that none is scattered."""
        return self.whole and bool((self.blocks[:, TARGET] < self.model).all())

    @cached_property
    def by_parts(self) -> bool:
        """Return True if the sums of one part of the model can be computed without the other parts.

        That is so if no entry is scattered, and the blocks of each section are in the order of their model positions.
        """
        targets = [work.blocks[:, TARGET] for work in self.works]
        return all(bool((own < self.model).all() and (np.diff(own) > 0).all()) for own in targets)

    @cached_property
    def edges(self) -> list[Integers]:
        """Return the blocks at which each part (:data:`PART` entries) of the model begins: one int64 array per
        section.

        Element i is the index of the first block in part i; the last element is the number of blocks. Requires that
        :attr:`by_parts` is True.
        """
        starts = np.arange(0, self.model + PART, PART)
        return [np.searchsorted(work.blocks[:, TARGET], starts) for work in self.works]

    @cached_property
    def stretches(self) -> dict[str, Stretches]:
        """Return the encoded arrays of each dtype, divided into stretches that one thread scans.

        By dtype, it is (indices of the arrays, byte offsets in them, numbers of values), with one element per stretch.
        """
        found: dict[str, list[tuple[int, int, int]]] = {}
        for source, name in enumerate(self.sources):
            dtype, shape = self.expected[name]
            size = math.prod(shape)
            found.setdefault(dtype, []).extend(
                (source, first, min(_STRETCH, size - first)) for first in range(0, size, _STRETCH)
            )
        listed = {dtype: np.array(rows, np.int64).reshape(-1, 3) for dtype, rows in found.items()}
        return {
            dtype: (
                rows[:, 0].copy(),
                (np.dtype(dtype).itemsize * rows[:, 1]).astype(np.uint64),
                rows[:, 2].copy(),
            )
            for dtype, rows in listed.items()
        }

    @cached_property
    def steepest(self) -> float:
        """Largest magnitude of the level of a code, which is multiplied by a scale that is part of the update.

        0 if the encoding has no such scales.
        """
        codes = [work.encoding for work in self.works if isinstance(work.encoding, CodeEncoding)]
        return max((reach(each, 1.0) for each in codes if each.scale is None), default=0.0)

    @cached_property
    def masked(self) -> tuple[list[str], Integers, Integers, Integers]:
        """Return the tensors that the mask covers, in its order, as four parallel sequences.

        They are (names, first bits in the mask, numbers of entries, numbers of entries that the mask keeps).
        """
        found = [
            (name, self.entries[name], section.encoding.kept(self.entries[name]))
            for section in self.form.sections
            if isinstance(section.encoding, SparseEncoding)
            for name in section.names
        ]
        lengths, kept = np.array([row[1:] for row in found], np.int64).reshape(-1, 2).T.copy()
        return [name for name, _, _ in found], np.cumsum(lengths) - lengths, lengths, kept

    def targets(self) -> Integers:
        """Return the position in the flat model of each entry of an update, int64 [size], in the order of
        :attr:`blocks`.
        """
        parts = [
            np.arange(at, at + length) if at < self.model else self.index[at - self.model :][:length]
            for length, at in self.blocks[:, [LENGTH, TARGET]].tolist()
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def compile_pieces(layout: Layout, regions: Mapping[str, Region], form: Form = DENSE) -> TierBlocks:
    """Return the compiled layout of a tier's updates, with which loops find the model position of every entry.

    Args:
        layout: Positions of the tensors in the flat model.
        regions: Positions of the tier's tensors in the global model, by local name.
        form: Encoding of the updates.

    Raises:
        KeyError: If the model does not have a tensor of ``regions``.
        ConfigError: If the value of a code exceeds the limit of the form.
    """
    for section in form.sections:
        _check_codes(section.encoding, form)
    regions = form.held(regions)
    shapes = {name: local_shape(name, regions[name], layout.shapes) for name in sorted(regions)}
    entries = {name: math.prod(shape) for name, shape in shapes.items()}
    cutter = _RunConverter(layout, regions)
    if form.sections:
        sources = tuple(form.arrays(entries))
        works = tuple(_works(form, entries, sources, cutter))
    else:
        sources = tuple(shapes)
        runs = [run for source, name in enumerate(sources) for run in cutter.runs(name, 0, 1, source)]
        works = (SectionBlocks(FloatEncoding(), _blocks(runs, 1, layout.size)),)
    return TierBlocks(form, regions, shapes, sources, works, cutter.index, sum(entries.values()), layout.size)


def reach(codes: CodeEncoding, scale: float) -> float:
    """Return the largest magnitude of the values of a code at this ``scale``: NaN or infinity if one of its values is."""
    with np.errstate(over="ignore"):
        return float(np.abs(np.float32(scale) * np.asarray(codes.levels, np.float32)).max())


def _check_codes(encoding: Encoding, form: Form) -> None:
    """Check that codes with a fixed scale cannot exceed the limit of ``form``. Scales in updates are checked
    elsewhere.

    Raises:
        ConfigError: If a code's value exceeds the limit.
    """
    if not isinstance(encoding, CodeEncoding) or encoding.scale is None:
        return
    largest = reach(encoding, encoding.scale)
    if not largest <= form.limit:
        raise ConfigError(
            f"codes of codec {form.codec!r} reach values up to {largest:.6g}, and an update may hold {form.limit:.0f}; "
            "choose a smaller scale",
            codec=form.codec,
            largest=largest,
        )


def _works(
    form: Form, entries: Mapping[str, int], sources: tuple[str, ...], cutter: _RunConverter
) -> Iterator[SectionBlocks]:
    """Yield the blocks (stretches of entries) of each section of ``form``, in order.

    A section is a group of tensors with one encoding. In an encoded array, its data follow those of the section
    before.

    Args:
        form: Encoding of the updates.
        entries: Number of entries of each local tensor.
        sources: Names of the encoded arrays.
        cutter: Converter of tensors into runs, which are joined and cut into blocks.
    """
    used = dict.fromkeys(("codes", "scales", "values", "halves", "mask"), 0)
    for section in form.sections:
        match section.encoding:
            case CodeEncoding(bits=bits):
                array, step = "codes", bits
            case FloatEncoding(dtype=dtype):
                array, step = "values" if dtype == "float32" else "halves", 1
            case SparseEncoding():
                array, step = "mask", 1
        runs: list[_Runs] = []
        scales, scale, first_value = section.scales, used["scales"], used["values"]
        groups = section.groups if scales else None
        source = sources.index(array) if array in sources else 0  # without entries there is no array
        for name in section.names:
            first = 8 * used["codes"] if array == "codes" else used[array]
            runs.extend(cutter.runs(name, first, step, source, groups))
            used[array] += packed_bytes(entries[name], step) if array == "codes" else entries[name]
        if isinstance(section.encoding, SparseEncoding):
            used["values"] += sum(section.encoding.kept(entries[name]) for name in section.names)
        used["scales"] += scales
        blocks = _blocks(runs, step, cutter.layout.size)
        yield SectionBlocks(section.encoding, blocks, scale, max(1, scales), first_value)


_Runs = tuple[int, int, int, int, int] | Integers
"""One run, or several as int64 [runs, 5], with the columns of a block."""


class _RunConverter:
    """Converter of tensors into runs: rows with the columns of a block, but of any length.

    It collects the model positions of scattered entries in :attr:`index`.
    """

    def __init__(self, layout: Layout, regions: Mapping[str, Region]) -> None:
        self.layout = layout
        self._regions = regions
        self._scattered: list[Positions] = []
        self._listed = 0

    @property
    def index(self) -> Integers:
        return np.concatenate(self._scattered) if self._scattered else np.zeros(1, np.int64)

    def runs(
        self, name: str, first: int, step: int, source: int, groups: Mapping[str, int] | None = None
    ) -> Iterator[_Runs]:
        """Yield the runs of tensor ``name``: stretches that are contiguous both in the update and in the model.

        Args:
            name: Name of the local tensor.
            first: Position of its first entry in the source array.
            step: Distance between entries, in bits or elements.
            source: Index of the source array.
            groups: Row of the scale of each global tensor; None for row 0.
        """
        for part, positions in pieces(name, self._regions[name], self.layout.shapes):
            if positions is None:
                size, target = math.prod(self.layout.shapes[part]), self.layout.offsets[part]
                yield first, size, source, 0 if groups is None else groups[part], target
                first += step * size
                continue
            lengths, targets = self._together(part, positions)
            starts = np.cumsum(lengths) - lengths
            rows = np.full(lengths.size, 0 if groups is None else groups[part])
            yield np.stack([first + step * starts, lengths, np.full(lengths.size, source), rows, targets], 1)
            first += step * int(lengths.sum())

    def _together(self, part: str, positions: Positions) -> tuple[Integers, Integers]:
        """Return (lengths, model positions) of the contiguous runs of global tensor ``part``, in local order, both
        int64.

        ``positions`` are the local entries' positions in that tensor. If the runs are too short, the positions are
        appended to the index, and one run refers to them.
        """
        start = self.layout.offsets[part]
        if not positions.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        edges = np.concatenate(([0], np.flatnonzero(np.diff(positions) != 1) + 1, [positions.size]))
        if positions.size >= _SHORT * (edges.size - 2):
            return np.diff(edges), start + positions[edges[:-1]]
        at = self.layout.size + self._listed
        self._scattered.append(start + positions)
        self._listed += positions.size
        return np.array([positions.size]), np.array([at])


def _no_blocks() -> Integers:
    return np.empty((0, 5), np.int64)


def _blocks(runs: list[_Runs], step: int, model: int) -> Integers:
    """Return blocks, int64 [blocks, 5]: adjacent ``runs`` joined, then cut at BLOCK entries and where model parts
    begin.

    ``step`` is the distance between entries in the source (bits or elements), ``model`` the number of entries of the
    model.
    """
    kinds = groupby(runs, lambda each: isinstance(each, tuple))
    parts = [np.array(list(each)) if single else np.concatenate(list(each)) for single, each in kinds]
    whole = np.concatenate(parts) if parts else _no_blocks()
    whole = whole[whole[:, LENGTH] > 0]
    if not len(whole):
        return whole
    before, after = whole[:-1], whole[1:]
    joins = (
        (before[:, FIRST] + step * before[:, LENGTH] == after[:, FIRST])
        & (before[:, TARGET] + before[:, LENGTH] == after[:, TARGET])
        & ((before[:, TARGET] < model) == (after[:, TARGET] < model))
        & (before[:, SOURCE] == after[:, SOURCE])
        & (before[:, ROW] == after[:, ROW])
    )
    starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    lengths = np.add.reduceat(whole[:, LENGTH], starts)
    whole = whole[starts]
    counts = -(-lengths // BLOCK)
    skipped = BLOCK * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    cut = np.repeat(whole, counts, 0)
    cut[:, FIRST] += step * skipped
    cut[:, TARGET] += skipped
    cut[:, LENGTH] = np.minimum(BLOCK, np.repeat(lengths, counts) - skipped)
    return _cut_at_parts(cut, step, model)


def _cut_at_parts(blocks: Integers, step: int, model: int) -> Integers:
    """Return ``blocks`` (int64 [blocks, 5]) with those cut in two that cross the boundary between two parts of the
    model.

    The argument's array is changed too. ``step`` and ``model`` are as in :func:`_blocks`.
    """
    left = PART - blocks[:, TARGET] % PART
    across = np.flatnonzero((blocks[:, TARGET] < model) & (left < blocks[:, LENGTH]))
    second, left = blocks[across], left[across]
    blocks[across, LENGTH] = left
    second[:, FIRST] += step * left
    second[:, TARGET] += left
    second[:, LENGTH] -= left
    return np.insert(blocks, across + 1, second, axis=0)
