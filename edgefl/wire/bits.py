"""Bit masks as bytes: packed bits, or gaps between the set ones, and the size of each (fiarse.md 8.3, R1).

A packed mask of ``count`` entries is uint8 of ceil(count / 8): entry 8 i + j is bit j of byte i, counted from the lowest,
as ``numpy.packbits(bitorder="little")`` has it. Gaps are LEB128 varints of ``index - previous index - 1``; the first
previous index is -1. A gap below 128 takes one byte, so gaps are smaller for masks with fewer than one entry in eight.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from edgefl.errors import ProtocolError

Mask = npt.NDArray[np.bool_]
Packed = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_PIECE = 1 << 16
"""Bytes processed at a time, so that a mask of any size costs a few MiB besides its result."""

_LONGEST = 9
"""Bytes of the longest varint: 63 bits, what an int64 holds without its sign."""


def pack(mask: Mask) -> Packed:
    """Return ``mask`` (bool, any shape, read in C order) as a packed mask, uint8 [ceil(n / 8)] for n entries."""
    return np.packbits(mask.reshape(-1), bitorder="little")


def unpack(packed: Packed, count: int) -> Mask:
    """Return the ``count`` entries of a packed mask as bool [count].

    Raises:
        ProtocolError: ``packed`` is no packed mask of ``count`` entries (:func:`check`).
    """
    check(packed, count)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def check(packed: npt.NDArray[np.generic], count: int) -> None:
    """Raise ProtocolError unless ``packed`` is uint8 [ceil(count / 8)] with no bit set beyond ``count``."""
    size = packed_bytes(count)
    if packed.dtype != np.uint8 or packed.shape != (size,):
        raise ProtocolError(
            f"a packed mask of {count} entries is uint8 [{size}], not {packed.dtype} {list(packed.shape)}; "
            f"pack it with edgefl.wire.bits.pack and give its count of entries",
            count=count,
            shape=packed.shape,
        )
    if count % 8 and int(packed[-1]) >> count % 8:
        raise ProtocolError(
            f"a packed mask of {count} entries has bits set beyond its last entry; clear them and send the blob again",
            count=count,
        )


def to_gaps(packed: Packed, count: int) -> bytes:
    """Return the gaps between the set bits of a packed mask as LEB128 varints, or b"" if no bit is set.

    Args:
        packed: Packed mask, uint8 [ceil(count / 8)].
        count: Number of entries of the mask.

    Raises:
        ProtocolError: ``packed`` is no packed mask of ``count`` entries (:func:`check`).
    """
    check(packed, count)
    return b"".join(_varints(gaps) for gaps in _gaps(packed))


def from_gaps(data: bytes, count: int) -> Packed:
    """Return the packed mask of ``count`` entries that :func:`to_gaps` wrote, uint8 [ceil(count / 8)].

    The result takes that many bytes whatever ``data`` contains, so a receiver bounds ``count`` first.

    Raises:
        ProtocolError: A varint is cut short or longer than nine bytes, or an index is not below ``count``.
    """
    stored = np.frombuffer(data, np.uint8)
    packed = np.zeros(packed_bytes(count), np.uint8)
    start, previous = 0, -1
    while start < stored.size:
        gaps, used = _numbers(stored[start : start + _PIECE])
        positions = np.cumsum(gaps + 1) + previous
        # A sum beyond int64 turns negative, which read as unsigned is beyond any count.
        if int(positions.view(np.uint64).max()) >= count:
            raise ProtocolError(
                f"the gaps of a mask lead beyond its {count} entries; send the blob again", count=count
            )
        _set(packed, positions)
        start, previous = start + used, int(positions[-1])
    return packed


def packed_bytes(count: int, bits: int = 1) -> int:
    """Return the bytes that ``count`` entries of ``bits`` bits occupy when packed: ceil(count * bits / 8)."""
    return -(-count * bits // 8)


def gap_bytes(packed: Packed, count: int) -> int:
    """Return the number of bytes that :func:`to_gaps` would return, without building them.

    Raises:
        ProtocolError: ``packed`` is no packed mask of ``count`` entries (:func:`check`).
    """
    check(packed, count)
    return sum(int(_lengths(gaps).sum()) for gaps in _gaps(packed))


def _gaps(packed: Packed) -> Iterator[Numbers]:
    """Yield the gaps between the set bits of a packed mask, int64, in blocks. Each block has at least one gap."""
    previous = -1
    for start in range(0, packed.size, _PIECE):
        bits = np.unpackbits(packed[start : start + _PIECE], bitorder="little").view(np.bool_)
        positions = np.flatnonzero(bits).astype(np.int64) + 8 * start
        if positions.size:
            yield np.diff(positions, prepend=previous) - 1
            previous = int(positions[-1])


def _lengths(gaps: Numbers) -> Numbers:
    """Return the length in bytes of each gap's varint: one byte for every seven bits."""
    lengths = np.ones(gaps.size, np.int64)
    for shift in range(7, int(gaps.max()).bit_length(), 7):
        lengths += (gaps >> shift) > 0
    return lengths


def _varints(gaps: Numbers) -> bytes:
    """Return the LEB128 varints of ``gaps``, concatenated."""
    lengths = _lengths(gaps)
    starts = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    for place in range(int(lengths.max())):
        reach = np.flatnonzero(lengths > place)
        more = (lengths[reach] > place + 1).astype(np.int64) << 7
        data[starts[reach] + place] = ((gaps[reach] >> 7 * place) & 127) | more
    return data.tobytes()


def _numbers(piece: Packed) -> tuple[Numbers, int]:
    """Decode the complete varints at the beginning of ``piece``.

    Returns:
        The decoded numbers, and the count of bytes that they occupy.

    Raises:
        ProtocolError: The first varint is cut short, or one is longer than nine bytes.
    """
    ends = np.flatnonzero(piece < 128)
    starts = np.concatenate(([0], ends[:-1] + 1))
    longest = int((ends - starts).max()) + 1 if ends.size else 0
    if not 0 < longest <= _LONGEST:
        raise ProtocolError(
            f"a gap of a mask is cut short or longer than {_LONGEST} bytes; send the blob again",
            longest=_LONGEST,
        )
    numbers = (piece[starts] & 127).astype(np.int64)
    for place in range(1, longest):
        reach = np.flatnonzero(ends - starts >= place)
        numbers[reach] |= (piece[starts[reach] + place] & 127).astype(np.int64) << 7 * place
    return numbers, int(ends[-1]) + 1


def _set(packed: Packed, positions: Numbers) -> None:
    """Set the bits of ``packed`` at ``positions``, which ascend. Bits of the same byte are combined first."""
    places = positions >> 3
    first = np.flatnonzero(np.diff(places, prepend=-1))
    flags = (1 << (positions & 7)).astype(np.uint8)
    packed[places[first]] |= np.bitwise_or.reduceat(flags, first)
