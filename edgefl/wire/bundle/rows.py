"""Ports of a graph that are rows of a port of its manifest: ``state.weights.fc.weight[0:32]``.

Another form of a graph (:mod:`edgefl.wire.bundle.variants`) may read and write state in blocks of rows, each a port with the
name of the whole and the rows behind it. They lie in the memory of the whole, one behind the other, and cover it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from edgefl.wire.errors import BundleError

_ROWS = re.compile(r"(?P<whole>.+)\[(?P<start>\d{1,12}):(?P<stop>\d{1,12})\]")


class Rows(msgspec.Struct, frozen=True):
    """Rows ``start`` to ``stop`` (not included) of the leading axis of ``whole``."""

    whole: str
    start: int
    stop: int

    def place(self, address: int, shape: Sequence[int], itemsize: int) -> tuple[list[int], int]:
        """Shape and address of these rows of a tensor of ``shape`` that lies at ``address``; BundleError where it has no
        such rows: an engine that is given an address believes it."""
        if not shape or not self.start < self.stop <= shape[0]:
            raise BundleError(
                f"rows {self.start} to {self.stop} of {self.whole!r}, which has the shape {tuple(shape)}, do not exist: "
                "export the bundle again"
            )
        return [self.stop - self.start, *shape[1:]], address + self.start * math.prod(shape[1:]) * itemsize


def rows_of_port(name: str, start: int, stop: int) -> str:
    """How a graph names these rows of the port ``name``."""
    return f"{name}[{start}:{stop}]"


def rows_in(name: str) -> Rows | None:
    """What a graph's port is a part of; None for a whole one."""
    found = _ROWS.fullmatch(name) if name.endswith("]") else None
    return Rows(found["whole"], int(found["start"]), int(found["stop"])) if found else None


def cover(parts: Iterable[Rows], count: int) -> bool:
    """Whether the parts are ``count`` rows, in order, none missing and none twice."""
    at = 0
    for part in parts:
        if part.start != at or part.stop <= at:
            return False
        at = part.stop
    return at == count
