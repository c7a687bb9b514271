"""Regions: the entries of global tensors that a tensor of a tier holds, and a tier's share of one round's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgefl.wire.tensors import Array, Arrays

Positions = npt.NDArray[np.int64]
Axis = range | tuple[int, ...] | None
"""Indices of one dimension that are held, in local order. None means all of them."""


@dataclass(frozen=True)
class Block:
    """Part of one global tensor: the held indices of each dimension. The local shape is their counts."""

    axes: tuple[Axis, ...]

    @classmethod
    def leading(cls, *stops: int) -> Block:
        """Return the block of the first ``stops`` entries along each dimension."""
        return cls(tuple(range(stop) for stop in stops))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size if axis is None else len(axis) for axis, size in zip(self.axes, whole, strict=True))

    def positions(self, whole: tuple[int, ...]) -> Positions:
        """Return the row-major positions (int64, flat) in a tensor of shape ``whole``, in local order."""
        stride, positions = math.prod(whole), np.zeros(1, np.int64)
        for axis, size in zip(self.axes, whole, strict=True):
            stride //= size
            indices = np.arange(size) if axis is None else np.asarray(axis, np.int64)
            positions = (positions[:, None] + indices[None, :] * stride).reshape(-1)
        return positions


@dataclass(frozen=True, eq=False)
class Entries:
    """Single entries of several global tensors, held as one flat local tensor.

    ``positions`` (int64, ascending) count through the tensors ``names``, flattened row-major, one after the other.
    """

    names: tuple[str, ...]
    positions: Positions


Region = Block | Entries | None
"""Region of a local tensor: a block of the global tensor of its name, entries of several, or (None) the whole tensor."""


@dataclass(frozen=True)
class Placement:
    """A tier's share of one round's global weights; all that is needed to average any mixture of tiers.

    Attributes:
        regions: Region of each tensor of an update. A global entry becomes the mean over the updates that hold it, and keeps
            its value if there are none.
        payload: Arrays that only this tier's devices receive, by local name. Empty if they read the model's units.
        masks: Number of bits of each array of ``payload`` that is a packed mask.
    """

    regions: Mapping[str, Region]
    payload: Arrays = field(default_factory=dict)
    masks: Mapping[str, int] = field(default_factory=dict)


def local_shape(name: str, region: Region, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the local tensor ``name`` that holds ``region`` of global tensors of these ``shapes``."""
    if region is None:
        return shapes[name]
    return region.shape(shapes[name]) if isinstance(region, Block) else region.positions.shape


def pieces(
    name: str, region: Region, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Positions | None]]:
    """Yield (global tensor, row-major positions in it) for a local tensor's entries, in local order.

    None means all positions.
    """
    if region is None:
        yield name, None
    elif isinstance(region, Block):
        yield name, region.positions(shapes[name])
    else:
        start = 0
        for part in region.names:
            size = math.prod(shapes[part])
            first, last = np.searchsorted(region.positions, (start, start + size))
            yield part, region.positions[first:last] - start
            start += size


def spans(
    name: str, region: Region, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, slice, Positions | None]]:
    """Yield :func:`pieces`, each with the slice of its entries in the flat local tensor."""
    start = 0
    for part, positions in pieces(name, region, shapes):
        count = math.prod(shapes[part]) if positions is None else positions.size
        yield part, slice(start, start + count), positions
        start += count


def extract(weights: Mapping[str, Array], regions: Mapping[str, Region]) -> Arrays:
    """Return the local tensors of ``regions`` out of the global ``weights``. Cut tensors are copies."""
    shapes = {name: array.shape for name, array in weights.items()}
    local: Arrays = {}
    for name, region in regions.items():
        parts = [
            weights[part].reshape(-1) if positions is None else weights[part].reshape(-1)[positions]
            for part, positions in pieces(name, region, shapes)
        ]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        local[name] = flat.reshape(local_shape(name, region, shapes))
    return local
