"""The form of an update on the wire: which of its tensors are coded how, and where each one's bytes lie.

An update of :data:`DENSE` holds its tensors as they are, by name. Any other update holds at most five arrays, each the
concatenation of what the sections need, in the order of the sections and of the names within (``docs/protocol.md``)::

    codes    uint8    per tensor ceil(bits * entries / 8) bytes: entry j has bits j*bits .. (j+1)*bits-1, from the lowest
    scales   float32  one per group of each section of codes whose scale travels
    values   float32  entries as they are, and those that a sparse section kept, in order
    halves   float16, or uint16 with the bits of bfloat16
    mask     uint8    packed bits, one per entry of the sparse sections: 1 is kept

This file imports no torch: the server and its tools read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from edgefl.wire.bits import packed_bytes

_Region = TypeVar("_Region")

VERSION = 1
"""Of the layout above. A codec whose bytes change gets a new one."""

VALUE_LIMIT = 2.0**20
"""Largest magnitude of a weight in an update: no trained network comes near it, and sums of int64 stay exact."""

CHANGE_LIMIT = 2.0**12
"""Largest magnitude of a change. Sums have as many more bits for the small ones, which changes are made of."""

SIGNS = (-1.0, 1.0)
"""Levels of one bit."""


@dataclass(frozen=True)
class Codes:
    """``bits`` per entry; code c stands for ``scale * levels[c]``, a product of float32.

    ``levels`` has 2**bits numbers; a reader takes any code as it is, also one that no writer sends. ``scale``: the one
    that both sides know; None where one per group travels.
    """

    bits: int
    levels: tuple[float, ...]
    scale: float | None = None


@dataclass(frozen=True)
class Values:
    """Entries as floats."""

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Sparse:
    """The ceil(share * d) entries of largest magnitude of each update tensor, as float32; the others are 0."""

    share: float

    def kept(self, entries: int) -> int:
        # The product of 0.03 and 100 is a hair above 3, which must not keep a fourth.
        return min(entries, math.ceil(self.share * entries * (1 - 1e-12)))


Encoding = Codes | Values | Sparse


@dataclass(frozen=True)
class Section:
    """Update tensors that are coded alike. ``names`` are those of a placement's regions, ascending.

    ``groups`` gives each *global* tensor the number of its scale within the section, for codes whose scale travels.
    """

    names: tuple[str, ...]
    encoding: Encoding
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def scales(self) -> int:
        """How many scales travel for it."""
        own = isinstance(self.encoding, Codes) and self.encoding.scale is None
        return len(set(self.groups.values())) if own else 0


@dataclass(frozen=True)
class Form:
    """What an update's bytes mean. ``codec`` and ``version`` travel with bundle and update, and must agree.

    Without sections an update is dense. ``change``: entries are differences to the weights that the round began with,
    otherwise they are weights.
    """

    codec: str = "dense"
    version: int = VERSION
    sections: tuple[Section, ...] = ()
    change: bool = False

    def arrays(self, entries: Mapping[str, int]) -> dict[str, tuple[str, int]]:
        """(dtype, length) of each array of an update whose tensors have this many ``entries``; none if it is dense."""
        lengths = {"codes": 0, "scales": 0, "values": 0, "halves": 0}
        masked, half = 0, "float16"
        for section in self.sections:
            sizes = [entries[name] for name in section.names]
            match section.encoding:
                case Codes(bits=bits):
                    lengths["codes"] += sum(packed_bytes(size, bits) for size in sizes)
                    lengths["scales"] += section.scales
                case Values(dtype="float32"):
                    lengths["values"] += sum(sizes)
                case Values(dtype=dtype):
                    lengths["halves"] += sum(sizes)
                    half = "uint16" if dtype == "bfloat16" else dtype
                case Sparse() as sparse:
                    lengths["values"] += sum(sparse.kept(size) for size in sizes)
                    masked += sum(sizes)
        dtypes = {"codes": "uint8", "scales": "float32", "values": "float32", "halves": half}
        layout = {name: (dtypes[name], size) for name, size in lengths.items() if size}
        return layout | ({"mask": ("uint8", packed_bytes(masked))} if masked else {})

    @property
    def limit(self) -> float:
        """Largest magnitude that an entry of an update may have."""
        return CHANGE_LIMIT if self.change else VALUE_LIMIT

    @property
    def silent(self) -> bool:
        """Whether an update cannot show that training diverged: all it holds is codes whose scale is known beforehand."""
        return bool(self.sections) and all(
            isinstance(section.encoding, Codes) and section.encoding.scale is not None
            for section in self.sections
        )

    def held(self, regions: Mapping[str, _Region]) -> dict[str, _Region]:
        """Those of ``regions`` that an update of this form has entries for: what is not trained has no changes to send."""
        names = {name for section in self.sections for name in section.names}
        return {name: region for name, region in regions.items() if name in names or not names}

    @property
    def masked(self) -> tuple[str, ...]:
        """Names of all tensors of the sparse sections, in the order of the mask."""
        return tuple(
            n for section in self.sections if isinstance(section.encoding, Sparse) for n in section.names
        )


DENSE = Form()
