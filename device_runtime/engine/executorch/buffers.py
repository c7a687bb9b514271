"""Memory for values that a program reads and writes in place: no copies between calls."""

from __future__ import annotations

import math
import mmap
from typing import Any, Final

import numpy as np

from edgefl.wire.bundle.manifest import Port
from edgefl.wire.errors import BundleError
from edgefl.wire.tensors import Array

_ALIGNMENT: Final = 64
_SLACK: Final = 64
"""XNNPACK's kernels may read this far (16 bytes on most processors) beyond the end of an input."""


def new_buffer(port: Port) -> Array:
    """An array for ``port``, not filled, that may be read a little beyond its end."""
    return _room(port.shape, np.dtype(port.dtype))


def owned_copy(array: Array) -> Array:
    """A copy that belongs to the engine, and may be read a little beyond its end."""
    copy = _room(array.shape, array.dtype)
    copy[...] = array
    return copy


def checked(array: Array, port: Port, graph: str) -> Array:
    """``array``; BundleError if it is not what ``port`` takes, as the program trusts its address."""
    if array.shape != port.shape or array.dtype != np.dtype(port.dtype):
        raise BundleError(
            f"graph {graph!r} takes {port.dtype} {port.shape} at {port.name!r}, and was given {array.dtype} {array.shape}: "
            "the values do not belong to this bundle",
            graph=graph,
            port=port.name,
        )
    return array


def readable(array: Array) -> Array:
    """Somebody's ``array``, rows first, aligned and readable beyond its end: a copy only where it is not."""
    plain = np.require(array, requirements=("C", "A"))
    end = plain.ctypes.data + plain.nbytes
    # A process has whole pages: what follows the end is there unless the next page is meant.
    return owned_copy(plain) if -end % mmap.PAGESIZE < _SLACK else plain


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT + _SLACK, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
