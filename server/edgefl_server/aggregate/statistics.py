"""Bounds on the untrained entries of an update: moving means, moving variances and counters.

The norm of a change does not bound them, because one large variance would hide every weight. So each entry has its
own bound, in units that depend on its kind. With the entry's value b at the round's begin, and the mean v of the
variances of its layer, the unit is

* max(b, v) for a variance,
* max(|b|, sqrt(v)) for a mean,
* max(|b|, root mean square of the tensor) for any other tensor,

and 1 if that is 0. A variance below 0 is invalid and becomes 0.

Bounds alone do not protect a mean: a few devices could move each layer by the full bound in every round. So
federations with a robust rule or clipping take the median over the holders of each entry instead. ::

    bounds = bounds_of(weights, ["bn.running_mean", "bn.running_var"], reach=3.0)
    bounds.clamp(form, arrays, regions, shapes)    # None if all lie within, else the decoded and clamped update
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import EntryRegion, Region, local_shape, spans
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.decode import decode, read, split, widen
from edgefl.wire.update.form import CodeEncoding, FloatEncoding, Form, Section, SparseEncoding
from edgefl_server.aggregate.robust import RobustRule, combine

# The entries of a few tensors out of an update, read at once: where they lie is worked out once for a tier's form.
#
# :func:`edgefl.wire.update.decode.read` reads one tensor after the other, and says what the values must be. This does
# the same for many small ones, of which a network has a hundred, in a few steps over all of them. ::
#
#     read = make_reader(form, {"bn.running_mean", "bn.running_var"}, regions, shapes)
#     read.names              # in the order of the entries
#     read(arrays)            # float32 [entries of all of them]

Reals = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
_Part = Callable[[Mapping[str, Array]], Reals]


@dataclass(frozen=True)
class TensorReader:
    """Reader of some tensors of an encoded update.

    Attributes:
        names: Local tensors, in the order of the returned entries.
        parts: Functions from the encoded arrays to the entries of some of these tensors, in the same order.
    """

    names: tuple[str, ...]
    parts: tuple[_Part, ...]

    def __call__(self, arrays: Mapping[str, Array]) -> Reals:
        """Return the decoded entries of all ``names``, concatenated, from the checked arrays of an update."""
        found = [part(arrays) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.float32), *found])


def make_reader(
    form: Form, held: Collection[str], regions: Mapping[str, Region], shapes: Shapes
) -> TensorReader | None:
    """Return a reader of the local tensors ``held``, or None if one of them is sparse.

    Masks of sparse tensors differ between updates, so their positions cannot be computed before.

    Args:
        form: Encoding of the updates.
        held: Local tensors to read.
        regions: Positions of the tensors in the global model.
        shapes: Shapes of the global tensors.
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
        if isinstance(section.encoding, SparseEncoding):
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
    """Return (name of the section's encoded array, first index of each tensor in it, first index behind the section).

    Args:
        section: Section of codes or floats; not sparse.
        sizes: Number of entries of each tensor of the section.
        places: First unused index of each encoded array.
    """
    match section.encoding:
        case CodeEncoding(bits=bits):
            key, lengths = "codes", {name: packed_bytes(size, bits) for name, size in sizes.items()}
        case FloatEncoding(dtype=dtype):
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
    if isinstance(section.encoding, CodeEncoding):
        bits = section.encoding.bits
        first = [8 * starts[name] + bits * np.arange(sizes[name]) for name in chosen]
        scales = [_scales(section, name, regions[name], shapes, first_scale) for name in chosen]
        return _code_reader(section.encoding, np.concatenate(first), np.concatenate(scales))
    where = np.concatenate([starts[name] + np.arange(sizes[name]) for name in chosen])
    return lambda arrays: widen(arrays[key][where]) if where.size else np.empty(0, np.float32)


def _code_reader(encoding: CodeEncoding, where: Positions, scales: Positions) -> _Part:
    """Return a function that decodes some codes of an update, from its arrays to float32 [codes].

    The codes begin at the bits ``where``, and use the scales at the indices ``scales`` unless the encoding has a fixed
    scale.
    """
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
    """Return the index of each entry's scale in the update's array ``scales``, int64 [entries of tensor ``name``].

    ``first`` is the index of the section's first scale.
    """
    counts = [(part, where.stop - where.start) for part, where, _ in spans(name, region, shapes)]
    groups = section.groups if section.scales else dict.fromkeys((part for part, _ in counts), 0)
    return np.concatenate(
        [np.full(count, first + groups[part], np.int64) for part, count in counts] or [np.empty(0, np.int64)]
    )


def _dense(name: str) -> _Part:
    return lambda arrays: arrays[name].reshape(-1).astype(np.float32, copy=False)


MEAN, VARIANCE = "running_mean", "running_var"
"""Last part of the names of torch's moving statistics."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _TierBounds:
    """Precomputed check of updates of one ``form`` and tier.

    Attributes:
        form: Encoding of the updates.
        regions: Positions of the tier's tensors in the global model.
        held: Local tensors with bounded entries.
        read: Reader of these tensors; None if updates have to be decoded.
        chosen: Indices of the bounded entries in the reader's result.
        low: Lower bound of each of these entries.
        high: Upper bound of each of these entries.
    """

    form: Form
    regions: Mapping[str, Region]
    held: tuple[str, ...]
    read: TensorReader | None
    chosen: npt.NDArray[np.int64]
    low: Reals
    high: Reals

    def inside(self, arrays: Mapping[str, Array]) -> bool:
        """Return True if all bounded entries are within the bounds; False if one is not, or if the update must be
        decoded for the check.
        """
        if self.read is None:
            return False
        found = self.read(arrays)[self.chosen]
        return bool(((self.low <= found) & (found <= self.high)).all())


@dataclass(frozen=True)
class StatisticsBounds:
    """Bounds of the entries of the tensors in ``base``. All arrays are flat float32, by global name.

    Attributes:
        base: Values at the round's begin.
        low: Lowest permitted values.
        high: Highest permitted values.
        median: Replace the weighted mean of these entries by the median over their holders.
    """

    base: Mapping[str, Reals]
    low: Mapping[str, Reals]
    high: Mapping[str, Reals]
    median: bool = False
    _looks: dict[int, _TierBounds] = field(default_factory=dict, compare=False, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """Global names of the bounded tensors."""
        return frozenset(self.base)

    def clamp(
        self, form: Form, arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes
    ) -> Arrays | None:
        """Return the decoded update with its bounded entries clamped, or None if all are within the bounds.

        Args:
            form: Encoding of the update.
            arrays: Encoded arrays by name.
            regions: Positions of its tensors in the global model.
            shapes: Shapes of the global tensors.
        """
        look = self._looks.get(id(regions))
        if look is None or (look.form, look.regions) != (form, regions):
            look = self._looks[id(regions)] = self._prepare_tier(form, regions, shapes)
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
        """Return the update's entries of all tensors in :attr:`names`, decoded and concatenated, float32.

        Entries that it does not hold are NaN.
        """
        row = {name: np.full(values.shape, np.nan, np.float32) for name, values in self.base.items()}
        held = [name for name, region in regions.items() if self.names & _global_names(name, region)]
        for name, region, flat in _of(held, form, arrays, regions, shapes):
            for part, where, positions in self._parts(name, region, shapes):
                row[part][slice(None) if positions is None else positions] = flat[where]
        return np.concatenate(list(row.values()))

    def medians(self, rows: Sequence[Reals], old: Mapping[str, Array], *, change: bool) -> Arrays:
        """Return the new tensors of :attr:`names`: medians over ``rows``, or ``old`` at entries without a holder.

        ``rows`` are results of :meth:`row`. With ``change`` the medians are added to ``old``. The result is empty
        without rows.
        """
        if not rows:
            return {}
        values = np.stack(rows)
        found, held = combine(values, ~np.isnan(values), RobustRule("median"))
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

    def _prepare_tier(self, form: Form, regions: Mapping[str, Region], shapes: Shapes) -> _TierBounds:
        """Return the precomputed check of a tier's updates, which all have this form and these regions."""
        held = tuple(name for name, region in regions.items() if self.names & _global_names(name, region))
        read = make_reader(form, held, regions, shapes)
        chosen, lows, highs, start = [], [], [], 0
        for name in read.names if read is not None else ():
            for part, where, positions in self._parts(name, regions[name], shapes):
                low, high = self._between(form, part, positions)
                chosen.append(np.arange(start + where.start, start + where.stop))
                lows.append(low)
                highs.append(high)
            start += math.prod(local_shape(name, regions[name], shapes))
        return _TierBounds(form, regions, held, read, _join(chosen, np.int64), _join(lows), _join(highs))

    def _parts(
        self, name: str, region: Region, shapes: Shapes
    ) -> Iterator[tuple[str, slice, npt.NDArray[np.int64] | None]]:
        """Yield the bounded global tensors of which the local tensor ``name`` holds entries.

        Each is (global name, slice of the flat local tensor, positions in the flat global tensor or None for all).
        """
        return (each for each in spans(name, region, shapes) if each[0] in self.base)

    def _between(self, form: Form, part: str, positions: npt.NDArray[np.int64] | None) -> tuple[Reals, Reals]:
        """Return (lowest, highest) permitted value of the entries at ``positions`` of global tensor ``part``; None for
        all entries.

        If ``form`` holds changes, these are bounds of the change.
        """
        own = slice(None) if positions is None else positions
        low, high, base = self.low[part][own], self.high[part][own], self.base[part][own]
        return (low - base, high - base) if form.change else (low, high)


def bounds_of(
    weights: Mapping[str, Array], names: Iterable[str], reach: float, *, median: bool = False
) -> StatisticsBounds:
    """Return bounds of ``reach`` units around ``weights`` for the tensors ``names``.

    Args:
        weights: Global model at the round's begin.
        names: Global tensors to bound.
        reach: Largest distance from ``weights`` in units, which depend on the kind of tensor (see this module). With 0
            only variances are bounded, from below by 0.
        median: True to replace the mean of these entries by the median over their holders.
    """
    base = {name: weights[name].reshape(-1).astype(np.float32) for name in sorted(names)}
    low, high = {}, {}
    for name, values in base.items():
        far = reach * _unit(name, base) if reach else np.full(values.shape, np.inf, np.float32)
        low[name], high[name] = (values - far).astype(np.float32), (values + far).astype(np.float32)
        if is_variance(name):
            low[name] = np.maximum(low[name], np.float32(0.0))
            high[name] = np.maximum(high[name], np.float32(0.0))
    return StatisticsBounds(base, low, high, median)


def is_variance(name: str) -> bool:
    """Return True if the last part of the tensor's name is torch's name of a moving variance, ``running_var``."""
    return name.rpartition(".")[2] == VARIANCE


def without_negative_variances(arrays: Mapping[str, Array], names: Collection[str]) -> Arrays:
    """Return ``arrays`` with the moving variances among ``names`` raised to at least 0.

    They can be negative because changes are rounded.
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
    """Yield (local tensor, its region in the global model, its flat decoded entries) for the tensors ``held`` of an
    update.

    Its other tensors are not decoded.
    """
    if not form.sections:
        for name in held:
            yield name, regions[name], arrays[name].reshape(-1)
        return
    for coded in split(form, arrays, regions, shapes):
        if coded.name in held:
            yield coded.name, regions[coded.name], read(coded, regions[coded.name], shapes)


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])


def _global_names(name: str, region: Region) -> set[str]:
    return set(region.names) if isinstance(region, EntryRegion) else {name}
