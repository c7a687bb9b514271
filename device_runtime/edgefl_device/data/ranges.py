"""Checks of the values of whole arrays. Single rows: :mod:`edgefl_device.data.problems`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.tensors import Array
from edgefl_device.data.spool import released

_SCANNED = 1 << 20
"""Values that are looked at together."""


def blocks(array: Array, each: int = 0) -> Iterator[Array]:
    """Yield ``array`` in blocks of rows: a mapped file may be larger than memory. ``each`` is the number of values of a
    row, if it represents more than it holds."""
    size = each or array.size // max(1, len(array))
    rows = max(1, _SCANNED // max(1, size))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
        released(array)


def converted(array: Array, dtype: str) -> Array:
    """Return the values as floats of this type; those that are too large become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def check_range(name: str, array: Array, dtype: str, source: str) -> None:
    """Raise DataError if whole numbers exceed ``dtype``: a conversion would change them."""
    least, most, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
    if not limits.min <= least <= most <= limits.max:
        raise DataError(
            f"{source}: {name} go from {least} to {most}, the model takes {dtype}, {limits.min} to {limits.max}",
            found=most,
        )


def check_below(name: str, array: Array, below: int, source: str) -> None:
    """Raise DataError if whole numbers are not 0 .. below-1: a vocabulary has no such token."""
    if not below:
        return
    least, most = int(array.min()), int(array.max())
    if not 0 <= least <= most < below:
        raise DataError(
            f"{source}: {name} go from {least} to {most}, the model takes whole numbers from 0 to {below - 1}: prepare the "
            "data with the vocabulary of the federation",
            found=most,
            below=below,
        )


def check_finite(name: str, array: Array, source: str) -> None:
    """Raise DataError if values are NaN or infinite: the loss would look like diverged training."""
    if array.dtype.kind != "f":
        return
    wrong = {"NaN": 0, "infinite": 0}
    first = None
    rows = max(
        1, _SCANNED * len(array) // max(1, array.size)
    )  # a file that is mapped may be larger than memory
    for start in range(0, len(array), rows):
        block = array[start : start + rows]
        finite = np.isfinite(block)
        if finite.all():
            continue
        nan = int(np.isnan(block).sum())
        wrong["NaN"] += nan
        wrong["infinite"] += finite.size - int(finite.sum()) - nan
        if first is None:
            first = start + int(np.argmin(finite.reshape(len(block), -1).all(axis=1)))
    if first is not None:
        count, kinds = sum(wrong.values()), " or ".join(kind for kind in wrong if wrong[kind])
        values = f"1 value of {name} is" if count == 1 else f"{count} values of {name} are"
        text = f"{source}: {values} {kinds}, first at row {first}: repair or remove such rows (rows count from 0)"
        raise DataError(text, count=count, row=first)
