"""How large an update is before it is there: exact bytes, from its form and the shapes of its tensors alone.

Nothing is allocated and torch is not imported: the server asks with each update, tools before a run. ::

    size = update_size(form, {"head.weight": (10, 64), "norm.running_mean": (64,)}, {"norm.running_mean"})
    size.nbytes, size.float32_bytes     # 264, 2976: one bit, six for statistics, and 128 bytes of header
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edgefl.wire.update.form import Codes, Encoding, Form, Section, Sparse, Values

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_SAFETENSORS = {"float32": ("F32", 4), "float16": ("F16", 2), "uint16": ("U16", 2), "uint8": ("U8", 1)}
"""Name of each dtype in a safetensors header, and bytes of an entry."""

_LENGTH = 8
"""The header's length stands before it, and its text is filled up to a multiple of this."""


@dataclass(frozen=True)
class PartSize:
    """What one section of an update takes. ``bits`` are those of an entry, without the ``scales``; ``nbytes`` is all."""

    tensors: int
    entries: int
    bits: float
    scales: int
    nbytes: int
    statistics: bool


@dataclass(frozen=True)
class UpdateSize:
    """``nbytes`` of an update's tensors, names and shapes in, and ``float32_bytes`` of the same ones as they are.

    Masks count as packed bits; one that is smaller as gaps takes less.
    """

    parts: tuple[PartSize, ...]
    nbytes: int
    float32_bytes: int

    @property
    def ratio(self) -> float:
        """How many times smaller than float32."""
        return self.float32_bytes / self.nbytes

    @property
    def statistics_bytes(self) -> int:
        """Of moving statistics, which no training computes (fedbat.md, 2.7); headers are not in."""
        return sum(part.nbytes for part in self.parts if part.statistics)


def update_size(form: Form, shapes: Shapes, statistics: Collection[str] = ()) -> UpdateSize:
    """The size of an update with tensors of these ``shapes``, of which ``statistics`` names those that are not trained."""
    entries = {name: math.prod(shape) for name, shape in shapes.items()}
    sections = form.sections or _as_they_are(shapes, statistics)
    parts = tuple(_part(section, entries, statistics) for section in sections)
    dense = float32_bytes(shapes)
    arrays = {name: (dtype, (length,)) for name, (dtype, length) in form.arrays(entries).items()}
    return UpdateSize(parts, blob_bytes(arrays) if form.sections else dense, dense)


def float32_bytes(shapes: Shapes) -> int:
    """Bytes of float32 tensors of these shapes as a blob."""
    return blob_bytes({name: ("float32", shape) for name, shape in shapes.items()})


def blob_bytes(arrays: Mapping[str, tuple[str, Shape]]) -> int:
    """Length of ``edgefl.wire.tensors.dump`` of arrays with these dtypes and shapes, masks packed."""
    header: dict[str, object] = {}
    start = 0
    for name, (dtype, shape) in sorted(
        arrays.items(), key=lambda item: (-_SAFETENSORS[item[1][0]][1], item[0])
    ):
        code, width = _SAFETENSORS[dtype]
        end = start + width * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
        start = end
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return _LENGTH + math.ceil(text / _LENGTH) * _LENGTH + start


def _as_they_are(shapes: Shapes, statistics: Collection[str]) -> tuple[Section, ...]:
    """A dense update as sections, so that what it takes can be told in the same words."""
    trained = tuple(sorted(name for name in shapes if name not in statistics))
    others = tuple(sorted(name for name in shapes if name in statistics))
    return tuple(Section(names, Values()) for names in (trained, others) if names)


def _part(section: Section, entries: Mapping[str, int], statistics: Collection[str]) -> PartSize:
    alone = Form(sections=(section,)).arrays(entries)
    return PartSize(
        tensors=len(section.names),
        entries=sum(entries[name] for name in section.names),
        bits=bits_per_entry(section.encoding),
        scales=section.scales,
        nbytes=sum(_SAFETENSORS[dtype][1] * length for dtype, length in alone.values()),
        statistics=all(name in statistics for name in section.names),
    )


def bits_per_entry(encoding: Encoding) -> float:
    """What is sent for an entry, on average; scales, padding to whole bytes and names are not in."""
    match encoding:
        case Codes(bits=bits):
            return float(bits)
        case Values(dtype=dtype):
            return 8.0 * _SAFETENSORS["uint16" if dtype == "bfloat16" else dtype][1]
        case Sparse(share=share):
            return 32.0 * share + 1.0
