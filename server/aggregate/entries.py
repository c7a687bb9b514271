"""The entries of a few tensors out of an update, read at once: where they lie is worked out once for a tier's form.

:func:`edgefl.wire.update.decode.read` reads one tensor after the other, and says what the values must be. This does the same
for many small ones, of which a network has a hundred, in a few steps over all of them. ::

    read = reader(form, {"bn.running_mean", "bn.running_var"}, regions, shapes)
    read.names              # in the order of the entries
    read(arrays)            # float32 [entries of all of them]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import Region, local_shape, pieces
from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import widen
from edgefl.wire.update.form import Codes, Form, Section, Sparse, Values

Reals = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
Shapes = Mapping[str, tuple[int, ...]]
_Part = Callable[[Mapping[str, Array]], Reals]


@dataclass(frozen=True)
class Reader:
    """``names``: local tensors in the order in which their entries are given."""

    names: tuple[str, ...]
    parts: tuple[_Part, ...]

    def __call__(self, arrays: Mapping[str, Array]) -> Reals:
        """The entries in the checked arrays of an update, one tensor after the other."""
        found = [part(arrays) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.float32), *found])


def reader(form: Form, held: Collection[str], regions: Mapping[str, Region], shapes: Shapes) -> Reader | None:
    """Of the local tensors ``held``; None where some of them travel with a mask, which is different in each update."""
    if not form.sections:
        names = tuple(sorted(held))
        return Reader(names, tuple(_dense(name) for name in names))
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
    return Reader(tuple(found), tuple(parts))


def _starts(
    section: Section, sizes: Mapping[str, int], places: Mapping[str, int]
) -> tuple[str, dict[str, int], int]:
    """The array that a section's tensors travel in, where each begins in it, and where the last one ends."""
    match section.encoding:
        case Codes(bits=bits):
            key, lengths = "codes", {name: packed_bytes(size, bits) for name, size in sizes.items()}
        case Values(dtype=dtype):
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
    """Codes of which each begins at the bit ``where``, and has the scale that lies at ``scales``."""
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
    """Where in the update's scales that of each entry lies."""
    counts = [
        (part, math.prod(shapes[part]) if positions is None else positions.size)
        for part, positions in pieces(name, region, shapes)
    ]
    groups = section.groups if section.scales else dict.fromkeys((part for part, _ in counts), 0)
    return np.concatenate(
        [np.full(count, first + groups[part], np.int64) for part, count in counts] or [np.empty(0, np.int64)]
    )


def _dense(name: str) -> _Part:
    return lambda arrays: arrays[name].reshape(-1).astype(np.float32, copy=False)
