"""Values of a program: ports of its manifest entry, or rows of a port that holds state.

A program names none of its values, and they are the ports by order; or some of them are rows, and it names all
(:mod:`edgefl.wire.bundle.graphs`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.bundle.graphs import RowRange, cover, rows_in
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.tensors import Array
from edgefl_device.engine.executorch.binding import ProgramValue

# Memory for values that a program reads and writes in place: no copies between calls.

_ALIGNMENT: Final = 64
_SLACK: Final = 64
"""XNNPACK's kernels may read this far (16 bytes on most processors) beyond the end of an input."""


def new_buffer(port: Port) -> Array:
    """Return an array for ``port``, not filled, that may be read a little beyond its end."""
    return _room(port.shape, np.dtype(port.dtype))


def owned_copy(array: Array) -> Array:
    """Return a copy that belongs to the engine, and may be read a little beyond its end."""
    copy = _room(array.shape, array.dtype)
    copy[...] = array
    return copy


def checked(array: Array, port: Port, graph: str) -> Array:
    """Return ``array``; BundleError if it does not fit ``port``, as the program trusts its address."""
    if array.shape != port.shape or array.dtype != np.dtype(port.dtype):
        raise BundleError(
            f"graph {graph!r} takes {port.dtype} {port.shape} at {port.name!r}, and was given {array.dtype} {array.shape}: "
            "the values do not belong to this bundle",
            graph=graph,
            port=port.name,
        )
    return array


def readable(array: Array) -> Array:
    """Return a caller's ``array``, rows first, aligned and readable beyond its end; copied only if it is not."""
    plain = np.require(array, requirements=("C", "A"))
    end = plain.ctypes.data + plain.nbytes
    # A process has whole pages: reads beyond the end are safe unless they reach the next page.
    return owned_copy(plain) if -end % mmap.PAGESIZE < _SLACK else plain


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT + _SLACK, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


_MOST_TEXT = 200


@dataclass(frozen=True)
class ValueLocation:
    """Location of a value: the array of ``port``, at its beginning or at that of its ``rows``."""

    port: Port
    rows: RowRange | None

    def address(self, arrays: Mapping[str, Array]) -> int:
        """Return the address in ``arrays``, by port name, each with the type and shape of its port."""
        array = arrays[self.port.name]
        start = int(array.ctypes.data)
        return self.rows.place(start, array.shape, array.itemsize)[1] if self.rows else start

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return tuple(self.port.shape)
        return self.rows.stop - self.rows.start, *self.port.shape[1:]


def places(
    graph: Graph, inputs: Sequence[ProgramValue], outputs: Sequence[ProgramValue]
) -> tuple[tuple[ValueLocation, ...], tuple[ValueLocation, ...]]:
    """Return the locations of inputs and outputs; BundleError if they contradict the manifest, or cannot have memory."""
    wrong: list[str] = []
    found = (
        _placed("inputs", graph.inputs, inputs, wrong),
        _placed("outputs", graph.outputs, outputs, wrong),
    )
    if not wrong:
        wrong += [*_unlike(found[0], inputs, False), *_unlike(found[1], outputs, graph.planned_outputs)]
        wrong += _uncovered(graph.outputs, found[1])
    if wrong:
        listed = "; ".join(text[:_MOST_TEXT] for text in wrong[:5])
        raise BundleError(
            f"graph {graph.name!r} and its manifest disagree on {listed}: export the bundle again",
            graph=graph.name,
        )
    return found


def _placed(
    kind: str, ports: tuple[Port, ...], values: Sequence[ProgramValue], wrong: list[str]
) -> tuple[ValueLocation, ...]:
    """Return the locations of values; ``wrong`` receives contradictions to the manifest."""
    if not any(value.name for value in values):
        if len(ports) != len(values):
            wrong.append(f"{len(ports)} {kind} listed, {len(values)} in the program")
            return ()
        return tuple(ValueLocation(port, None) for port in ports)
    listed = {port.name: port for port in ports}
    found: list[ValueLocation] = []
    for value in values:
        rows = rows_in(value.name)
        port = listed.get(rows.whole if rows else value.name)
        if port is None or (rows and not _has(port, rows)):
            wrong.append(f"{value.name}: the manifest lists no such {kind}")
        else:
            found.append(ValueLocation(port, rows))
    missing = listed.keys() - {place.port.name for place in found}
    wrong += [f"{name}: it is missing from the {kind} of the program" for name in sorted(missing)]
    return tuple(found)


def _has(port: Port, rows: RowRange) -> bool:
    return port.role == "state" and len(port.shape) > 0 and rows.start < rows.stop <= port.shape[0]


def _unlike(found: Sequence[ValueLocation], values: Sequence[ProgramValue], planned: bool) -> Iterator[str]:
    for place, value in zip(found, values, strict=True):
        name = value.name or place.port.name
        if (place.port.dtype, place.shape) != (value.dtype, value.shape):
            yield f"{name}: {place.port.dtype} {place.shape} listed, {value.dtype} {value.shape} in the program"
        if value.planned != planned:
            where = "memory that the program planned itself", "the caller's memory"
            yield f"{name}: it is in {where[planned]}"
        if value.permuted:
            yield f"{name}: it is not in row order"


def _uncovered(ports: Sequence[Port], found: Sequence[ValueLocation]) -> Iterator[str]:
    """Yield outputs that are not written exactly once: an output is one value, or rows that are all of it."""
    for port in ports:
        parts = [place.rows for place in found if place.port is port]
        rows = [each for each in parts if each]
        is_whole = parts == [None]
        if not is_whole and (len(rows) < len(parts) or not cover(rows, port.shape[0])):
            yield f"{port.name}: rows that are not all of it"
