"""Problems of single rows: the first one ends the reading, or such rows are left out and counted."""

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
