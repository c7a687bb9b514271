"""Regions: the entries of global tensors that each tensor of a tier holds, and a tier's part of the global weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgefl.wire.tensors import Array, Arrays

Positions = npt.NDArray[np.int64]
Axis = range | tuple[int, ...] | None
"""Indices along one dimension that the region holds, in local order. None: all of them."""


@dataclass(frozen=True)
class BlockRegion:
    """Region in one global tensor: a set of indices along each dimension.

    Attributes:
        axes: Held indices of each dimension, in local order. None: all of them.
    """

    axes: tuple[Axis, ...]

    @classmethod
    def leading(cls, *stops: int) -> BlockRegion:
        """Return the block of the leading entries of a tensor: the first ``stops[i]`` along dimension i."""
        return cls(tuple(range(stop) for stop in stops))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the local tensor, for a global tensor of shape ``whole``."""
        return tuple(size if axis is None else len(axis) for axis, size in zip(self.axes, whole, strict=True))

    def positions(self, whole: tuple[int, ...]) -> Positions:
        """Return the row-major positions of the held entries in a tensor of shape ``whole``, int64, flat, in local
        order.
        """
        stride, positions = math.prod(whole), np.zeros(1, np.int64)
        for axis, size in zip(self.axes, whole, strict=True):
            stride //= size
            indices = np.arange(size) if axis is None else np.asarray(axis, np.int64)
            positions = (positions[:, None] + indices[None, :] * stride).reshape(-1)
        return positions


@dataclass(frozen=True, eq=False)
class EntryRegion:
    """Region of single entries in several global tensors, which the tier holds as one flat tensor.

    Attributes:
        names: Names of the global tensors.
        positions: int64, ascending: positions in the concatenation of the flattened (row-major) tensors ``names``.
    """

    names: tuple[str, ...]
    positions: Positions


Region = BlockRegion | EntryRegion | None
"""Region of a local tensor: a block of the global tensor with the same name, entries of several tensors, or None for the
whole tensor."""


@dataclass(frozen=True)
class Placement:
    """Position of a tier's tensors in the global weights of one round.

    The server needs nothing else to average updates of different tiers. A local tensor is one that a device of the
    tier holds, in its own shape.

    Attributes:
        regions: Region of each tensor of an update, by its name: the entries of global tensors that it holds. A
            global entry becomes the mean over the updates that hold it. It keeps its value if no update does.
        payload: Arrays that only devices of this tier receive, by local name. Empty if the devices read the
            weights of the model's units (stages of the model) instead.
        masks: Number of bits of each array of ``payload`` that is a packed mask.
    """

    regions: Mapping[str, Region]
    payload: Arrays = field(default_factory=dict)
    masks: Mapping[str, int] = field(default_factory=dict)


def local_shape(name: str, region: Region, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a local tensor: a tensor in the shape that a device of the tier holds.

    Args:
        name: Name of the local tensor. If its region is no :class:`EntryRegion`, it is also the name of the global
            tensor.
        region: Entries of the global tensors that it holds. None: the whole tensor ``name``.
        shapes: Shapes of the global tensors, by name.
    """
    if region is None:
        return shapes[name]
    return region.shape(shapes[name]) if isinstance(region, BlockRegion) else region.positions.shape


def pieces(
    name: str, region: Region, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Positions | None]]:
    """Yield the global tensors whose entries a local tensor holds, in local order.

    Args:
        name: Name of the local tensor.
        region: Its region. None: the whole global tensor ``name``.
        shapes: Shapes of the global tensors, by name.

    Yields:
        Name of the global tensor, and the row-major positions in it (None: all positions).
    """
    if region is None:
        yield name, None
    elif isinstance(region, BlockRegion):
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
    """Yield the global tensors whose entries a local tensor holds, with the place of the entries in the local tensor.

    Args:
        name: Name of the local tensor.
        region: Its region. None: the whole global tensor ``name``.
        shapes: Shapes of the global tensors, by name.

    Yields:
        Name of the global tensor, slice of its entries in the flat local tensor, and their row-major positions in
        the global tensor (None: all positions).
    """
    start = 0
    for part, positions in pieces(name, region, shapes):
        count = math.prod(shapes[part]) if positions is None else positions.size
        yield part, slice(start, start + count), positions
        start += count


def extract(weights: Mapping[str, Array], regions: Mapping[str, Region]) -> Arrays:
    """Return the local tensors of ``regions`` by name: the entries of the global ``weights`` that each region selects.

    A whole tensor is a view of the global one; others are copies.
    """
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
