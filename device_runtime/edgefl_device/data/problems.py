"""Problems of local data: checks of whole arrays, and single rows that end the reading or are left out and counted."""

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
    """``where``: the file, and the line or row in it."""

    where: str
    text: str


@dataclass
class Problems:
    """Problems of rows that were left out. With policy ``refuse`` the first one is a DataError."""

    policy: Policy = "refuse"
    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, where: str, text: str, rows: int = 1) -> None:
        """Leave out ``rows`` rows; DataError under the policy ``refuse``."""
        if self.policy == "refuse":
            raise DataError(
                f"{where}: {text}; repair or remove it, or have bad rows skipped",
                where=where,
            )
        self.count += rows
        if len(self.first) < SHOWN:
            self.first.append(Problem(where, text))

    def __str__(self) -> str:
        """Return a summary in one line; "" if there are none."""
        if not self.count:
            return ""
        first = f"{self.first[0].where}: {self.first[0].text}"
        return (
            f"1 row is left out, {first}"
            if self.count == 1
            else f"{self.count} rows are left out, the first is {first}"
        )


def checked_policy(name: str) -> Policy:
    """Return ``name`` as a policy; ConfigError lists the policies."""
    for known in get_args(Policy):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"bad rows cannot be {name!r}: one of {', '.join(get_args(Policy))}", policy=name)


def bad_values(arrays: Mapping[str, Array], below: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield (row, problem) for each row with a value that is NaN or infinite, or a whole number outside 0 .. ``below``-1
    of its array. Rows are read in blocks: a mapped file may be larger than memory."""
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
    """Yield ``array`` in blocks of rows: a mapped file may be larger than memory. ``each`` is the number of values of a
    row, if it represents more than it holds."""
    size = each or array.size // max(1, len(array))
    rows = max(1, _SCANNED // max(1, size))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


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
