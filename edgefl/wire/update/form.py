"""Form of an update: the encoding of each tensor, the layout of its arrays, and its size.

A dense update (:data:`DENSE`) contains its tensors by name. Any other update contains at most five arrays. Each is the
concatenation of its sections' parts, in the order of the sections and of the names within (``docs/protocol.md``)::

    codes    uint8    per tensor ceil(bits * entries / 8) bytes: entry j has bits j*bits .. (j+1)*bits-1, lowest first;
    scales   float32  one per group of each section of codes, unless the form has a constant scale;
    values   float32  entries of float32 sections, and the kept entries of sparse sections, in order;
    halves   float16, or uint16 with the bits of bfloat16;
    mask     uint8    packed bits, one per entry of the sparse sections; 1 means kept

The size depends on the form and the shapes only. This module imports no torch, because the server and its tools read
it. ::

    size = update_size(form, {"head.weight": (10, 64), "norm.running_mean": (64,)}, {"norm.running_mean"})
    size.nbytes, size.float32_bytes     # 264, 2976: one bit, six for statistics, and 128 bytes of header
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from edgefl.wire.bits import packed_bytes

_Region = TypeVar("_Region")

VERSION = 1
"""Version of the layout in this module. A codec whose bytes change gets a new version."""

VALUE_LIMIT = 2.0**20
"""Largest magnitude of a weight in an update. No trained network comes near it, and int64 sums stay exact."""

CHANGE_LIMIT = 2.0**12
"""Largest magnitude of a change in an update. Changes are small, and a lower limit leaves their sums more bits."""

SIGNS = (-1.0, 1.0)
"""Levels of a code of one bit."""


@dataclass(frozen=True)
class CodeEncoding:
    """Encoding of an entry as a code of a few bits. Code c means ``scale * levels[c]``, a float32 product.

    Attributes:
        bits: Bits per entry, 1 to 8.
        levels: 2**bits numbers. A reader accepts every code, even if no writer sends it.
        scale: Constant scale of all entries. None: one scale per group is sent with the update.
    """

    bits: int
    levels: tuple[float, ...]
    scale: float | None = None


@dataclass(frozen=True)
class FloatEncoding:
    """Encoding of entries as floats of ``dtype``."""

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


@dataclass(frozen=True)
class SparseEncoding:
    """Encoding of the ceil(share * d) largest of a tensor's d entries as float32. The other entries are 0."""

    share: float

    def kept(self, entries: int) -> int:
        # The product of 0.03 and 100 is a hair above 3, which must not keep a fourth.
        """Return the number of entries that are kept of ``entries`` entries."""
        return min(entries, math.ceil(self.share * entries * (1 - 1e-12)))


Encoding = CodeEncoding | FloatEncoding | SparseEncoding


@dataclass(frozen=True)
class Section:
    """Group of tensors of an update with the same encoding.

    Attributes:
        names: Names of the tensors, ascending.
        encoding: Encoding of the tensors.
        groups: Index of the scale of each *global* tensor within the section, by name, if scales are sent with
            the update.
    """

    names: tuple[str, ...]
    encoding: Encoding
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def scales(self) -> int:
        """Number of scales that are sent for the section."""
        own = isinstance(self.encoding, CodeEncoding) and self.encoding.scale is None
        return len(set(self.groups.values())) if own else 0


@dataclass(frozen=True)
class Form:
    """Layout and meaning of an update.

    Attributes:
        codec: Name of the codec. It is part of the bundle and of the update, and both must agree.
        version: Version of the codec. It is part of the bundle and of the update, and both must agree.
        sections: Tensors by encoding. Empty: the update is dense.
        change: True if entries are differences from the weights that the round began with, False if they are weights.
    """

    codec: str = "dense"
    version: int = VERSION
    sections: tuple[Section, ...] = ()
    change: bool = False

    def arrays(self, entries: Mapping[str, int]) -> dict[str, tuple[str, int]]:
        """Return (dtype, length) of each array of an update, by name. A dense form returns {}.

        Args:
            entries: Number of entries of each tensor, by name.
        """
        lengths = {"codes": 0, "scales": 0, "values": 0, "halves": 0}
        masked, half = 0, "float16"
        for section in self.sections:
            sizes = [entries[name] for name in section.names]
            match section.encoding:
                case CodeEncoding(bits=bits):
                    lengths["codes"] += sum(packed_bytes(size, bits) for size in sizes)
                    lengths["scales"] += section.scales
                case FloatEncoding(dtype="float32"):
                    lengths["values"] += sum(sizes)
                case FloatEncoding(dtype=dtype):
                    lengths["halves"] += sum(sizes)
                    half = "uint16" if dtype == "bfloat16" else dtype
                case SparseEncoding() as sparse:
                    lengths["values"] += sum(sparse.kept(size) for size in sizes)
                    masked += sum(sizes)
        dtypes = {"codes": "uint8", "scales": "float32", "values": "float32", "halves": half}
        layout = {name: (dtypes[name], size) for name, size in lengths.items() if size}
        return layout | ({"mask": ("uint8", packed_bytes(masked))} if masked else {})

    @property
    def limit(self) -> float:
        """Largest accepted magnitude of an entry."""
        return CHANGE_LIMIT if self.change else VALUE_LIMIT

    @property
    def silent(self) -> bool:
        """True if updates cannot reveal that training diverged, because they contain only codes with constant scales."""
        return bool(self.sections) and all(
            isinstance(section.encoding, CodeEncoding) and section.encoding.scale is not None
            for section in self.sections
        )

    def held(self, regions: Mapping[str, _Region]) -> dict[str, _Region]:
        """Return the ``regions`` of the tensors that an update of this form contains, by name.

        Tensors that are not trained are not sent.

        A dense form contains all of them.
        """
        names = {name for section in self.sections for name in section.names}
        return {name: region for name, region in regions.items() if name in names or not names}

    @property
    def masked(self) -> tuple[str, ...]:
        """Names of all tensors of sparse sections, in the order of the mask."""
        return tuple(
            n
            for section in self.sections
            if isinstance(section.encoding, SparseEncoding)
            for n in section.names
        )


DENSE = Form()


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_SAFETENSORS = {"float32": ("F32", 4), "float16": ("F16", 2), "uint16": ("U16", 2), "uint8": ("U8", 1)}
"""Name of each dtype in a safetensors header, and bytes of an entry."""

_LENGTH = 8
"""Bytes of the header's length, and the multiple to which its text is padded."""


@dataclass(frozen=True)
class SectionSize:
    """Size of one section of an update.

    Attributes:
        tensors: Number of tensors.
        entries: Number of entries.
        bits: Mean bits per entry, scales excluded.
        scales: Number of scales that are sent.
        nbytes: Bytes of the section, scales included.
        statistics: True if it contains only moving statistics.
    """

    tensors: int
    entries: int
    bits: float
    scales: int
    nbytes: int
    statistics: bool


@dataclass(frozen=True)
class UpdateSize:
    """Size of an update. Masks count as packed bits; a mask that is sent as gaps takes less.

    Attributes:
        parts: Size of each section.
        nbytes: Bytes of the safetensors blob.
        float32_bytes: Bytes of a blob with the same tensors in float32.
    """

    parts: tuple[SectionSize, ...]
    nbytes: int
    float32_bytes: int

    @property
    def ratio(self) -> float:
        """Factor by which the update is smaller than float32."""
        return self.float32_bytes / self.nbytes

    @property
    def statistics_bytes(self) -> int:
        """Bytes of moving statistics, which are not trained (fedbat.md, 2.7). Excludes headers."""
        return sum(part.nbytes for part in self.parts if part.statistics)


def update_size(form: Form, shapes: Shapes, statistics: Collection[str] = ()) -> UpdateSize:
    """Return the exact size of an update, without allocating it.

    Args:
        form: Form of the update.
        shapes: Shape of each tensor of the update.
        statistics: Names of the tensors that are moving statistics.
    """
    entries = {name: math.prod(shape) for name, shape in shapes.items()}
    sections = form.sections or _dense_sections(shapes, statistics)
    parts = tuple(_section_size(section, entries, statistics) for section in sections)
    dense = float32_bytes(shapes)
    arrays = {name: (dtype, (length,)) for name, (dtype, length) in form.arrays(entries).items()}
    return UpdateSize(parts, blob_bytes(arrays) if form.sections else dense, dense)


def float32_bytes(shapes: Shapes) -> int:
    """Return the size in bytes of a safetensors blob with float32 tensors of these shapes."""
    return blob_bytes({name: ("float32", shape) for name, shape in shapes.items()})


def blob_bytes(arrays: Mapping[str, tuple[str, Shape]]) -> int:
    """Return the number of bytes that :func:`edgefl.wire.tensors.dump` would write. Masks count as packed bits.

    Args:
        arrays: Dtype and shape of each array, by name.
    """
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


def _dense_sections(shapes: Shapes, statistics: Collection[str]) -> tuple[Section, ...]:
    """Return the sections of a dense update: trained tensors, then statistics."""
    trained = tuple(sorted(name for name in shapes if name not in statistics))
    others = tuple(sorted(name for name in shapes if name in statistics))
    return tuple(Section(names, FloatEncoding()) for names in (trained, others) if names)


def _section_size(section: Section, entries: Mapping[str, int], statistics: Collection[str]) -> SectionSize:
    """Return the size of a section.

    Args:
        section: Section of an update.
        entries: Number of entries of each tensor, by name.
        statistics: Names of the tensors that are moving statistics.
    """
    alone = Form(sections=(section,)).arrays(entries)
    return SectionSize(
        tensors=len(section.names),
        entries=sum(entries[name] for name in section.names),
        bits=bits_per_entry(section.encoding),
        scales=section.scales,
        nbytes=sum(_SAFETENSORS[dtype][1] * length for dtype, length in alone.values()),
        statistics=all(name in statistics for name in section.names),
    )


def bits_per_entry(encoding: Encoding) -> float:
    """Return the mean number of bits that an entry takes. Excludes scales, padding to whole bytes, and headers."""
    match encoding:
        case CodeEncoding(bits=bits):
            return float(bits)
        case FloatEncoding(dtype=dtype):
            return 8.0 * _SAFETENSORS["uint16" if dtype == "bfloat16" else dtype][1]
        case SparseEncoding(share=share):
            return 32.0 * share + 1.0
