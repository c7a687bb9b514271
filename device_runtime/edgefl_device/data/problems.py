"""Checks of local data: of whole arrays, and of single rows that are either an error or skipped and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import numpy as np

from edgefl.errors import ConfigError, DataError
from edgefl.wire.tensors import Array
from edgefl_device.config import Policy

SHOWN = 20
"""Problems that are kept word by word; all are counted."""

_SCANNED = 1 << 20
"""Values that are looked at together."""


class Problem(msgspec.Struct, frozen=True):
    """Problem of one row. ``where`` names the file and the line or row in it."""

    where: str
    text: str


@dataclass
class Problems:
    """Count of skipped rows, and the first problems. With policy ``refuse`` the first bad row raises DataError instead."""

    policy: Policy = "refuse"
    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, where: str, text: str, rows: int = 1) -> None:
        """Count ``rows`` skipped rows. Store ``where`` and ``text`` as a :class:`Problem` if it is one of the first 20.

        Raises:
            DataError: The policy is ``refuse``.
        """
        if self.policy == "refuse":
            raise DataError(f"{where}: {text}; repair or remove it, or have bad rows skipped", where=where)
        self.count += rows
        if len(self.first) < SHOWN:
            self.first.append(Problem(where, text))

    def __str__(self) -> str:
        """Return a summary in one line, or "" if no row was skipped."""
        if not self.count:
            return ""
        first = f"{self.first[0].where}: {self.first[0].text}"
        return (
            f"1 row is left out, {first}"
            if self.count == 1
            else f"{self.count} rows are left out, the first is {first}"
        )


def checked_policy(name: str) -> Policy:
    """Return ``name`` if it is a policy for bad rows (``refuse`` or ``skip``).

    Raises:
        ConfigError: ``name`` is no policy; the text lists the policies.
    """
    for known in get_args(Policy):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"bad rows cannot be {name!r}: one of {', '.join(get_args(Policy))}", policy=name)


def bad_values(arrays: Mapping[str, Array], below: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield (row, problem) for each row with a NaN, an infinite value or a whole number outside of its range.

    Args:
        arrays: Arrays by name, with the same number of rows.
        below: For arrays of whole numbers, the bound: values from 0 to ``below`` - 1 are valid.
    """
    rows = min(map(len, arrays.values()))
    width = sum(array[:1].size for array in arrays.values())
    block = max(1, _SCANNED // max(1, width))
    for start in range(0, rows, block):
        found: dict[int, str] = {}
        for name, array in arrays.items():
            part = array[start : start + block]
            for row, text in _bad_in(name, part.reshape(len(part), -1), below.get(name, 0)):
                found.setdefault(start + row, text)
        yield from sorted(found.items())


def _bad_in(name: str, rows: Array, below: int) -> Iterator[tuple[int, str]]:
    if rows.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist():
            yield row, f"{name} has a value that is NaN or infinite"
    elif below:
        wrong = (rows < 0) | (rows >= below)
        for row in np.flatnonzero(wrong.any(axis=1)).tolist():
            value = int(rows[row][wrong[row]][0])
            yield row, f"{name} has {value}, the model takes whole numbers from 0 to {below - 1}"


def blocks(array: Array, each: int = 0) -> Iterator[Array]:
    """Yield ``array`` in blocks of successive rows, because a mapped file may be larger than memory.

    Args:
        array: The rows.
        each: Number of values that one row has after decoding, which bounds the rows of a block. 0: the number of
            values that it has in ``array``.
    """
    size = each or array.size // max(1, len(array))
    rows = max(1, _SCANNED // max(1, size))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def converted(array: Array, dtype: str) -> Array:
    """Return ``array`` as floats of type ``dtype``. Values that are too large become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def check_range(name: str, array: Array, dtype: str, source: str) -> None:
    """Check that the whole numbers of ``array`` fit into ``dtype``. The error names the array (``name``) and its data
    (``source``).

    Raises:
        DataError: The smallest or largest value would change in the conversion.
    """
    least, most, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
    if not limits.min <= least <= most <= limits.max:
        raise DataError(
            f"{source}: {name} go from {least} to {most}, the model takes {dtype}, {limits.min} to {limits.max}",
            array=name,
            found=most,
        )


def check_below(name: str, array: Array, below: int, source: str) -> None:
    """Check that all values, such as tokens, are from 0 to ``below`` - 1. Does nothing if ``below`` is 0.

    Args:
        name: Name of the array, for the error.
        array: Whole numbers.
        below: Exclusive upper bound; 0: none.
        source: Name of the data, for the error.

    Raises:
        DataError: A value is outside.
    """
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
    """Check that floats are finite, because the loss would otherwise look like diverged training. Arrays of other types
    pass.

    Raises:
        DataError: A value is NaN or infinite; the text names ``source``, ``name`` and the first such row.
    """
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
        raise DataError(text, array=name, found=kinds, count=count, row=first)
