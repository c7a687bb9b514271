"""Reference decoder of updates in numpy, for the layout of :mod:`edgefl.wire.update.form`.

The server adds updates without decoding them; this module defines the correct result. Read it (with
``conformance/edgefl_conformance/data/updates``) before you write an app that sends updates. It imports no torch. ::

    codes = np.array([0, 1, 2, 3, 4, 5, 6], np.uint8)
    pack_codes(codes, 3).tobytes().hex()    # "88c61a": the seven codes are the octal digits of 0o6543210, lowest first
    changes = decode(form, arrays, placement.regions, shapes)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgefl.errors import ProtocolError
from edgefl.wire.bits import packed_bytes, unpack
from edgefl.wire.regions import Region, local_shape, pieces
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import CodeEncoding, FloatEncoding, Form, Section, SparseEncoding

Bytes = npt.NDArray[np.uint8]
Reals = npt.NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]


def pack_codes(codes: Array, bits: int) -> Bytes:
    """Return packed codes, uint8 [ceil(bits * entries / 8)].

    Entry j occupies bits j * bits .. (j + 1) * bits - 1, counted from the lowest bit of the first byte, with the code's
    lowest bit first. Bits beyond the last entry are 0.

    Args:
        codes: Integers below 2**bits, any shape, read in C order.
        bits: 1 to 8.

    Raises:
        ValueError: ``bits`` is out of range, or a code does not fit.
    """
    _check_bits(bits)
    if codes.size and not 0 <= codes.min() <= codes.max() < 1 << bits:
        raise ValueError(
            f"codes of {bits} bits are 0..{(1 << bits) - 1}, found {codes.min()}..{codes.max()}; use more bits"
        )
    rows = codes.reshape(-1, 1).astype(np.uint8)
    return np.packbits(np.unpackbits(rows, axis=1, count=bits, bitorder="little"), bitorder="little")


def unpack_codes(packed: Bytes, bits: int, count: int) -> Bytes:
    """Return the codes that :func:`pack_codes` packed, uint8 [count]. Ignores bits beyond the last code.

    Args:
        packed: uint8 [ceil(bits * count / 8)].
        bits: 1 to 8.
        count: Number of codes.

    Raises:
        ProtocolError: ``packed`` has another dtype or length.
        ValueError: ``bits`` is out of range.
    """
    _check_bits(bits)
    _check_array(f"{count} codes of {bits} bits", packed, "uint8", packed_bytes(count, bits))
    rows = np.unpackbits(packed, count=bits * count, bitorder="little").reshape(count, bits)
    return np.packbits(rows, axis=1, bitorder="little").reshape(count)


def widen(halves: Array) -> Reals:
    """Convert half-precision numbers to float32, exactly.

    Args:
        halves: float16, or uint16 with the bits of bfloat16 (the upper half of a float32).
    """
    if halves.dtype == np.uint16:
        return (halves.astype(np.uint32) << 16).view(np.float32)
    return halves.astype(np.float32)


@dataclass(frozen=True, eq=False)
class CodedTensor:
    """One tensor of an update, still encoded.

    Attributes:
        name: Name of the tensor.
        section: Section of the form (group of tensors with the same encoding) that contains it.
        data: Its part of the array ``codes``, ``values`` or ``halves``.
        scales: All scales of the section. Empty if the form has them as constants.
        kept: Its part of the mask, bool [entries], in sparse sections; else None.
    """

    name: str
    section: Section
    data: Array
    scales: Reals
    kept: npt.NDArray[np.bool_] | None = None


def split(
    form: Form, arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes
) -> Iterator[CodedTensor]:
    """Check the arrays of an update with sections, and return an iterator over its tensors in the order of the wire.

    Args:
        form: Form of the update: the sections (groups of tensors with the same encoding) and the layout.
        arrays: Arrays of the update by name.
        regions: Region of each tensor, by name.
        shapes: Shapes of the global tensors, by name.

    Raises:
        ProtocolError: Names, dtypes or lengths differ from ``form``, or the mask keeps another number of entries.
            Raised by the call itself, not by the iterator.
    """
    sizes = {name: math.prod(local_shape(name, region, shapes)) for name, region in regions.items()}
    _check_names("tensors of the form", [n for section in form.sections for n in section.names], regions)
    layout = form.arrays(sizes)
    _check_names("arrays of an update", list(arrays), layout)
    for name, (dtype, length) in layout.items():
        _check_array(f"array {name!r}", arrays[name], dtype, length)
    masks = _read_masks(form, arrays, sizes)
    return _split(form, _ArrayQueue(arrays), sizes, masks)


def decode(form: Form, arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes) -> Arrays:
    """Return the decoded tensors of an update: float32 in local shapes, by name.

    They are changes if ``form.change`` is True, else weights. A code's value is the float32 product of its scale and
    its level. Entries that a sparse section dropped are 0. The arrays of a dense update are returned unchanged.

    Args:
        form: Form of the update.
        arrays: Arrays of the update by name.
        regions: Entries of global tensors that each tensor of the update holds, by its name. None: a whole
            tensor.
        shapes: Shapes of the global tensors, by name.

    Raises:
        ProtocolError: The arrays do not fit ``form`` (:func:`split`). For a dense update: names, shapes or dtypes
            differ from ``regions``.
    """
    if not form.sections:
        _check_dense(arrays, regions, shapes)
        return dict(arrays)
    return {
        coded.name: read(coded, regions[coded.name], shapes).reshape(
            local_shape(coded.name, regions[coded.name], shapes)
        )
        for coded in split(form, arrays, regions, shapes)
    }


def read(coded: CodedTensor, region: Region, shapes: Shapes) -> Reals:
    """Return the decoded entries of one tensor, float32, flat, in local order.

    Args:
        coded: Encoded tensor.
        region: Its region. None: it is the whole global tensor.
        shapes: Shapes of the global tensors, by name.

    Raises:
        ProtocolError: The form has no scale for a global tensor of which the tensor holds entries.
    """
    match coded.section.encoding:
        case CodeEncoding() as codes:
            return _read_codes(coded, codes, region, shapes)
        case FloatEncoding():
            return widen(coded.data)
        case SparseEncoding():
            assert coded.kept is not None
            entries = np.zeros(coded.kept.size, np.float32)
            entries[coded.kept] = coded.data
            return entries


def iter_scales(coded: CodedTensor, region: Region, shapes: Shapes) -> Iterator[tuple[str, int, np.float32]]:
    """Yield the parts of a tensor of codes in local order, each with its scale.

    Entries of several global tensors may be sent as one tensor. Each of them is a part, and has the scale of its
    group.

    Args:
        coded: Encoded tensor.
        region: Entries of global tensors that it holds. None: it is the whole global tensor of its name.
        shapes: Shapes of the global tensors, by name.

    Yields:
        Name of the global tensor, number of its entries, and their scale.

    Raises:
        ProtocolError: The form has no scale for a global tensor.
    """
    encoding, groups = coded.section.encoding, coded.section.groups
    known = encoding.scale if isinstance(encoding, CodeEncoding) else None
    for part, positions in pieces(coded.name, region, shapes):
        count = math.prod(shapes[part]) if positions is None else positions.size
        if known is None and part not in groups:
            raise ProtocolError(
                f"the form gives {part!r} no scale, but {coded.name!r} holds entries of it; name it in `groups`",
                name=part,
            )
        yield part, count, coded.scales[groups[part]] if known is None else np.float32(known)


def _read_codes(coded: CodedTensor, codes: CodeEncoding, region: Region, shapes: Shapes) -> Reals:
    parts = list(iter_scales(coded, region, shapes))
    unpacked = unpack_codes(coded.data, codes.bits, sum(count for _, count, _ in parts))
    levels = np.asarray(codes.levels, np.float32)
    entries = np.empty(unpacked.size, np.float32)
    start = 0
    for _, count, scale in parts:
        entries[start : start + count] = (scale * levels)[unpacked[start : start + count]]
        start += count
    return entries


class _ArrayQueue:
    """Flat arrays of an update by name, from which ``take`` removes and returns the next entries in order."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = dict(arrays)

    def take(self, name: str, count: int) -> Array:
        if not count:  # an array of no entries does not travel
            return np.empty(0, np.float32)
        entries, self._left[name] = self._left[name][:count], self._left[name][count:]
        return entries


def _split(
    form: Form, queue: _ArrayQueue, sizes: Mapping[str, int], kept: Mapping[str, npt.NDArray[np.bool_]]
) -> Iterator[CodedTensor]:
    """Yield the encoded tensors of checked arrays, in the order of the form.

    Args:
        form: Form of the update.
        queue: Arrays, of which all entries are removed.
        sizes: Number of entries of each tensor, by name.
        kept: Mask of each tensor of a sparse section, bool [entries], by name.
    """
    for section in form.sections:
        scales = queue.take("scales", section.scales)
        for name in section.names:
            match section.encoding:
                case CodeEncoding(bits=bits):
                    size = packed_bytes(sizes[name], bits)
                    data = queue.take("codes", size).astype(np.uint8, copy=False)
                case FloatEncoding(dtype="float32"):
                    data = queue.take("values", sizes[name])
                case FloatEncoding():
                    data = queue.take("halves", sizes[name])
                case SparseEncoding() as sparse:
                    data = queue.take("values", sparse.kept(sizes[name]))
            yield CodedTensor(name, section, data, scales, kept.get(name))


def _read_masks(
    form: Form, arrays: Mapping[str, Array], sizes: Mapping[str, int]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the mask of each tensor of the sparse sections, bool [entries], by name.

    Raises:
        ProtocolError: A mask keeps another number of entries than the form.
    """
    counts = [sizes[name] for name in form.masked]
    if not sum(counts):
        return {name: np.zeros(0, np.bool_) for name in form.masked}
    mask = unpack(arrays["mask"], sum(counts))
    masks = dict(zip(form.masked, np.split(mask, np.cumsum(counts)[:-1]), strict=True))
    for section in form.sections:
        if isinstance(section.encoding, SparseEncoding):
            for name in section.names:
                _check_kept(name, masks[name], section.encoding.kept(sizes[name]))
    return masks


def _check_kept(name: str, kept: npt.NDArray[np.bool_], expected: int) -> None:
    """Raise ProtocolError unless the mask keeps the expected number of entries."""
    count = int(np.count_nonzero(kept))
    if count != expected:
        raise ProtocolError(
            f"the mask keeps {count} of the {kept.size} entries of {name!r}, expected {expected}; "
            f"set as many bits as the form keeps",
            name=name,
            found=count,
            expected=expected,
        )


def _check_dense(arrays: Mapping[str, Array], regions: Mapping[str, Region], shapes: Shapes) -> None:
    """Raise ProtocolError unless the arrays of a dense update fit ``regions``, the entries that each tensor holds.

    They must have the same names, the regions' shapes and a floating dtype.
    """
    _check_names("tensors of an update", list(arrays), regions)
    for name, region in regions.items():
        shape, array = local_shape(name, region, shapes), arrays[name]
        if array.shape != shape or array.dtype.kind != "f":
            raise ProtocolError(
                f"tensor {name!r} is {array.dtype} {list(array.shape)}, expected float32 {list(shape)}; "
                f"fetch the tier's bundle again",
                name=name,
            )


def _check_names(what: str, found: list[str], expected: Mapping[str, object]) -> None:
    if sorted(found) != sorted(expected):
        raise ProtocolError(
            f"the {what} are {sorted(found)}, expected {sorted(expected)}; fetch the tier's bundle again",
            found=sorted(found),
            expected=sorted(expected),
        )


def _check_array(what: str, array: Array, dtype: str, length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise ProtocolError(
            f"{what}: found {array.dtype} {list(array.shape)}, expected {dtype} [{length}]; "
            f"fetch the tier's bundle again",
            dtype=str(array.dtype),
            shape=array.shape,
        )


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"a code has 1 to 8 bits, not {bits}; send floats instead")
