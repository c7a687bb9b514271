"""Reusable memory for arrays: the system fills new pages with zeros, which costs time."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_BYTES = 128 << 20
"""Of an array that may be kept while nobody uses it: bounded, as is what that saves."""

_KEPT = 2
"""Arrays: the one in use, and the one before."""


class Spare:
    """Source of uninitialized arrays that reuses the memory of earlier arrays.

    Memory is reused once neither the array nor a view of it (a memoryview, a tensor) exists any more. Not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[Any]]]] = []

    def array(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array [size] whose content means nothing."""
        nbytes = size * np.dtype(dtype).itemsize
        if not 0 < nbytes <= _MOST_BYTES:
            return np.empty(size, dtype)
        memory = self._free(nbytes)
        # Views of views have this array for their base, and not the memory: numpy goes no further than to what is no array.
        found: npt.NDArray[Any] = np.frombuffer(memory.data, dtype)
        self._kept = [*self._kept[-_KEPT + 1 :], (memory, weakref.ref(found))]
        return found

    def _free(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return unused memory of ``nbytes`` and remove it from the kept ones."""
        for number, (memory, holder) in enumerate(self._kept):
            if holder() is None and memory.nbytes == nbytes:
                del self._kept[number]
                return memory
        return np.empty(nbytes, np.uint8)
