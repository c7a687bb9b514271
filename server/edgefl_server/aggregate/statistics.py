"""Bounds on what an update changes in untrained entries: moving means and variances, counts.

The norm of a change says nothing of them, as one large variance would hide every weight; so they are bounded on their own,
entry by entry, in units of what they are. With the round's value b of an entry, and the mean v of the variances of its
layer, the unit is

* max(b, v) for a variance,
* max(|b|, sqrt(v)) for a mean,
* max(|b|, root mean square of the tensor) for any other tensor,

and 1 where that is 0. A variance below 0 is invalid and counts as 0.

A bound alone leaves a mean of them at the mercy of a few: pulled by as many deviations in each layer, round after round, a
model is lost. So where a federation looks for bad updates at all, each becomes the median over its holders. ::

    bounds = bounds_of(weights, ["bn.running_mean", "bn.running_var"], reach=3.0)
    bounds.bounded(form, arrays, regions, shapes)    # None: all of them lie within; else the decoded update, moved there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import Entries, Region, local_shape, spans
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.decode import decode, read, split, widen
from edgefl.wire.update.form import Codes, FloatValues, Form, Section, Sparse
from edgefl_server.aggregate.robust import MeanRule, combine

# The entries of a few tensors out of an update, read at once: where they lie is worked out once for a tier's form.
#
# :func:`edgefl.wire.update.decode.read` reads one tensor after the other, and says what the values must be. This does
# the same for many small ones, of which a network has a hundred, in a few steps over all of them. ::
#
#     read = reader(form, {"bn.running_mean", "bn.running_var"}, regions, shapes)
#     read.names              # in the order of the entries
#     read(arrays)            # float32 [entries of all of them]

Reals = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
_Part = Callable[[Mapping[str, Array]], Reals]


@dataclass(frozen=True)
class TensorReader:
    """``names``: local tensors in the order in which their entries are given."""

    names: tuple[str, ...]
    parts: tuple[_Part, ...]

    def __call__(self, arrays: Mapping[str, Array]) -> Reals:
        """Return the entries in the checked arrays of an update, one tensor after the other."""
        found = [part(arrays) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.float32), *found])


def reader(
    form: Form, held: Collection[str], regions: Mapping[str, Region], shapes: Shapes
) -> TensorReader | None:
    """Return a reader for the local tensors ``held``, or None if some of them travel with a mask.

    Masks are different in each update.
    """
    if not form.sections:
        names = tuple(sorted(held))
        return TensorReader(names, tuple(_dense(name) for name in names))
    found: list[str] = []
    parts: list[_Part] = []
    places = {"codes": 0, "values": 0, "halves": 0, "scales": 0}
    for section in form.sections:
        sizes = {name: math.prod(local_shape(name, regions[name], shapes)) for name in section.names}
        chosen = [name for name in section.names if name in held]
        if isinstance(section.encoding, Sparse):
            if chosen:
                return None
            places["values"] += sum(section.encoding.kept(size) for size in sizes.values())
        else:
            key, starts, end = _starts(section, sizes, places)
            if chosen:
                parts.append(_part(section, chosen, starts, sizes, regions, shapes, key, places["scales"]))
            found += chosen
            places[key] = end
        places["scales"] += section.scales
    return TensorReader(tuple(found), tuple(parts))


def _starts(
    section: Section, sizes: Mapping[str, int], places: Mapping[str, int]
) -> tuple[str, dict[str, int], int]:
    """Return the array that contains a section's tensors, the start of each in it, and the end of the last one."""
    match section.encoding:
        case Codes(bits=bits):
            key, lengths = "codes", {name: packed_bytes(size, bits) for name, size in sizes.items()}
        case FloatValues(dtype=dtype):
            key, lengths = "values" if dtype == "float32" else "halves", dict(sizes)
    at, starts = places[key], {}
    for name, length in lengths.items():
        starts[name] = at
        at += length
    return key, starts, at


def _part(
    section: Section,
    chosen: Collection[str],
    starts: Mapping[str, int],
    sizes: Mapping[str, int],
    regions: Mapping[str, Region],
    shapes: Shapes,
    key: str,
    first_scale: int,
) -> _Part:
    if isinstance(section.encoding, Codes):
        bits = section.encoding.bits
        first = [8 * starts[name] + bits * np.arange(sizes[name]) for name in chosen]
        scales = [_scales(section, name, regions[name], shapes, first_scale) for name in chosen]
        return _coded(section.encoding, np.concatenate(first), np.concatenate(scales))
    where = np.concatenate([starts[name] + np.arange(sizes[name]) for name in chosen])
    return lambda arrays: widen(arrays[key][where]) if where.size else np.empty(0, np.float32)


def _coded(encoding: Codes, where: Positions, scales: Positions) -> _Part:
    """Return a reader of codes that begin at the bits ``where``, with the scales at ``scales``."""
    levels, known, bits = np.asarray(encoding.levels, np.float32), encoding.scale, encoding.bits
    first, last = (int(where.min()) // 8, (int(where.max()) + bits - 1) // 8 + 1) if where.size else (0, 0)
    places = where[:, None] - 8 * first + np.arange(bits)

    def read(arrays: Mapping[str, Array]) -> Reals:
        if not places.size:
            return np.empty(0, np.float32)
        packed = arrays["codes"][first:last].astype(np.uint8, copy=False)
        unpacked = np.unpackbits(packed, bitorder="little")[places]
        codes = np.packbits(unpacked, axis=1, bitorder="little").reshape(-1)
        scale = np.float32(known) if known is not None else arrays["scales"][scales]
        found: Reals = scale * levels[codes]
        return found

    return read


def _scales(section: Section, name: str, region: Region, shapes: Shapes, first: int) -> Positions:
    """Return the index of each entry's scale in the update's scales."""
    counts = [(part, where.stop - where.start) for part, where, _ in spans(name, region, shapes)]
    groups = section.groups if section.scales else dict.fromkeys((part for part, _ in counts), 0)
    return np.concatenate(
        [np.full(count, first + groups[part], np.int64) for part, count in counts] or [np.empty(0, np.int64)]
    )


def _dense(name: str) -> _Part:
    return lambda arrays: arrays[name].reshape(-1).astype(np.float32, copy=False)


MEAN, VARIANCE = "running_mean", "running_var"
"""What the names of torch's moving statistics end in."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Look:
    """Bounds of the updates of ``form``.

    Holds the names of the tensors ``held``, their reader (None: updates have to be decoded), the indices of the bounded
    entries, and the bounds.
    """

    form: Form
    regions: Mapping[str, Region]
    held: tuple[str, ...]
    read: TensorReader | None
    chosen: npt.NDArray[np.int64]
    low: Reals
    high: Reals

    def inside(self, arrays: Mapping[str, Array]) -> bool:
        """Return True if all entries lie within the bounds, False if that needs decoding."""
        if self.read is None:
            return False
        found = self.read(arrays)[self.chosen]
        return bool(((self.low <= found) & (found <= self.high)).all())


@dataclass(frozen=True)
class Bounds:
    """Lowest and highest value of each entry of the tensors in ``base``, all flat float32, by global name.

    ``median``: entries become the median over their holders, each of which counts once, instead of what the others become.
    """

    base: Mapping[str, Reals]
    low: Mapping[str, Reals]
    high: Mapping[str, Reals]
    median: bool = False
    _looks: dict[int, _Look] = field(default_factory=dict, compare=False, repr=False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.base)

    def bounded(
        self, form: Form, arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes
    ) -> Arrays | None:
        """Return the update, decoded, with every entry of :attr:`names` moved into its bounds; None if all are within."""
        look = self._looks.get(id(regions))
        if look is None or (look.form, look.regions) != (form, regions):
            look = self._looks[id(regions)] = self._look(form, regions, shapes)
        held = look.held
        if not held or look.inside(arrays):
            return None
        if look.read is None and all(
            self._inside(form, *each, shapes) for each in _of(held, form, arrays, regions, shapes)
        ):
            return None
        whole = {name: array.copy() for name, array in decode(form, arrays, regions, shapes).items()}
        for name in held:
            flat = whole[name].reshape(-1)
            for part, where, positions in self._parts(name, regions[name], shapes):
                flat[where] = np.clip(flat[where], *self._between(form, part, positions))
        return whole

    def row(
        self, form: Form, arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes
    ) -> Reals:
        """Return an update's entries of :attr:`names`, one tensor after the other, NaN for missing ones."""
        row = {name: np.full(values.shape, np.nan, np.float32) for name, values in self.base.items()}
        held = [name for name, region in regions.items() if self.names & _global_names(name, region)]
        for name, region, flat in _of(held, form, arrays, regions, shapes):
            for part, where, positions in self._parts(name, region, shapes):
                row[part][slice(None) if positions is None else positions] = flat[where]
        return np.concatenate(list(row.values()))

    def medians(self, rows: Sequence[Reals], old: Mapping[str, Array], *, change: bool) -> Arrays:
        """Return the new tensors of :attr:`names`: medians of ``rows``, or ``old`` for entries without a holder."""
        if not rows:
            return {}
        values = np.stack(rows)
        found, held = combine(values, ~np.isnan(values), MeanRule("median"))
        new, start = {}, 0
        for name in self.base:
            part, before = slice(start, start + old[name].size), old[name].reshape(-1)
            after = np.where(held[part], found[part] + (before if change else 0), before)
            new[name] = after.astype(old[name].dtype).reshape(old[name].shape)
            start = part.stop
        return new

    def _inside(self, form: Form, name: str, region: Region, flat: Array, shapes: Shapes) -> bool:
        for part, where, positions in self._parts(name, region, shapes):
            low, high = self._between(form, part, positions)
            if not ((low <= flat[where]) & (flat[where] <= high)).all():
                return False
        return True

    def _look(self, form: Form, regions: Mapping[str, Region], shapes: Shapes) -> _Look:
        """Return a fast check of the updates of a tier against the bounds of :attr:`names`."""
        held = tuple(name for name, region in regions.items() if self.names & _global_names(name, region))
        read = reader(form, held, regions, shapes)
        chosen, lows, highs, start = [], [], [], 0
        for name in read.names if read is not None else ():
            for part, where, positions in self._parts(name, regions[name], shapes):
                low, high = self._between(form, part, positions)
                chosen.append(np.arange(start + where.start, start + where.stop))
                lows.append(low)
                highs.append(high)
            start += math.prod(local_shape(name, regions[name], shapes))
        return _Look(form, regions, held, read, _joined(chosen, np.int64), _joined(lows), _joined(highs))

    def _parts(
        self, name: str, region: Region, shapes: Shapes
    ) -> Iterator[tuple[str, slice, npt.NDArray[np.int64] | None]]:
        """Return (global tensor, slice of its entries in the local one, their positions in it) for the bounded ones."""
        return (each for each in spans(name, region, shapes) if each[0] in self.base)

    def _between(self, form: Form, part: str, positions: npt.NDArray[np.int64] | None) -> tuple[Reals, Reals]:
        """Return the bounds of these entries, for values or for changes."""
        own = slice(None) if positions is None else positions
        low, high, base = self.low[part][own], self.high[part][own], self.base[part][own]
        return (low - base, high - base) if form.change else (low, high)


def bounds_of(
    weights: Mapping[str, Array], names: Iterable[str], reach: float, *, median: bool = False
) -> Bounds:
    """Return bounds of ``reach`` units around the round's ``weights``; 0: unlimited, but no variance below 0."""
    base = {name: weights[name].reshape(-1).astype(np.float32) for name in sorted(names)}
    low, high = {}, {}
    for name, values in base.items():
        far = reach * _unit(name, base) if reach else np.full(values.shape, np.inf, np.float32)
        low[name], high[name] = (values - far).astype(np.float32), (values + far).astype(np.float32)
        if is_variance(name):
            low[name] = np.maximum(low[name], np.float32(0.0))
            high[name] = np.maximum(high[name], np.float32(0.0))
    return Bounds(base, low, high, median)


def is_variance(name: str) -> bool:
    return name.rpartition(".")[2] == VARIANCE


def without_negative_variances(arrays: Mapping[str, Array], names: Collection[str]) -> Arrays:
    """Return ``arrays`` with variances among ``names`` raised to at least 0, because rounding may make a change to 0
    negative.
    """
    variances = {name: np.maximum(arrays[name], 0) for name in names if is_variance(name) and name in arrays}
    return {**arrays, **{name: array.astype(arrays[name].dtype) for name, array in variances.items()}}


def _unit(name: str, base: Mapping[str, Reals]) -> Reals:
    values = np.abs(base[name])
    layer, _, kind = name.rpartition(".")
    variances = base.get(f"{layer}.{VARIANCE}" if layer else VARIANCE)
    if kind in (MEAN, VARIANCE) and variances is not None and variances.size:
        spread = float(np.abs(variances).mean())
        scale = math.sqrt(spread) if kind == MEAN else spread
    else:
        scale = math.sqrt(float(np.square(values, dtype=np.float64).mean())) if values.size else 0.0
    return np.maximum(values, np.float32(scale or 1.0))


def _of(
    held: Collection[str],
    form: Form,
    arrays: Mapping[str, Array],
    regions: Mapping[str, Region],
    shapes: Shapes,
) -> Iterator[tuple[str, Region, Array]]:
    """Return (local tensor, its region, its entries) of the tensors ``held``. Decodes no others."""
    if not form.sections:
        for name in held:
            yield name, regions[name], arrays[name].reshape(-1)
        return
    for coded in split(form, arrays, regions, shapes):
        if coded.name in held:
            yield coded.name, regions[coded.name], read(coded, regions[coded.name], shapes)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])


def _global_names(name: str, region: Region) -> set[str]:
    return set(region.names) if isinstance(region, Entries) else {name}
