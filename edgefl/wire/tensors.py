"""Named tensors as safetensors bytes, with the checks that an untrusted sender requires.

A bit mask that is smaller as gaps travels as gaps (``edgefl.wire.bits``), in an entry named ``<name>~gaps:<count>``. The
encoding is private to this module: callers pass and receive packed masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

from edgefl.errors import ProtocolError
from edgefl.wire import bits

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Piece = bytes | memoryview
"""Some bytes of a longer message; a view keeps its array alive."""

MAX_MASK_BITS = 1 << 33
"""Most entries of all masks of one blob: 1 GiB packed, as much as the largest blob that a device accepts."""

_FLOAT = np.dtype("<f4")
_RESERVED = "~"
_GAPS = re.compile(r"([^~]*)~gaps:(0|[1-9][0-9]{0,18})")


def dump(arrays: Mapping[str, Array], masks: Mapping[str, int] | None = None) -> bytes:
    """Return the safetensors bytes of arrays. Equal arrays give equal bytes, whatever the order of the mapping.

    Args:
        arrays: Arrays by name. No name contains ``~``.
        masks: Number of entries of each array that is a packed mask (uint8 [ceil(count / 8)]). A mask is stored as it is or
            as gaps, whichever is shorter.

    Raises:
        ProtocolError: A mask is missing or does not have its number of entries, or a name contains ``~``.
    """
    return b"".join(pieces(arrays, masks))


def pieces(arrays: Mapping[str, Array], masks: Mapping[str, int] | None = None) -> list[Piece]:
    """Return the bytes of :func:`dump` as a list of pieces, some of which are views of float32 arrays.

    Joining them would copy the arrays.

    Args:
        arrays: Arrays by name. No name contains ``~``.
        masks: Number of entries of each array that is a packed mask.

    Raises:
        ProtocolError: A mask is missing or does not have its number of entries, or a name contains ``~``.
    """
    stored = dict(arrays)
    reserved = [name for name in arrays if _RESERVED in name]
    if reserved:
        raise ProtocolError(
            f"a tensor cannot be called {reserved[0]!r}: {_RESERVED!r} is reserved in blobs; rename it",
            name=reserved[0],
            reserved=_RESERVED,
        )
    for name, count in (masks or {}).items():
        if name not in arrays:
            raise ProtocolError(
                f"there is no tensor {name!r} to send as a mask; leave it out of `masks` or add it", name=name
            )
        packed = stored[name]
        if bits.gap_bytes(packed, count) < packed.size:
            del stored[name]
            stored[f"{name}~gaps:{count}"] = np.frombuffer(bits.to_gaps(packed, count), np.uint8)
    # np.asarray, because np.ascontiguousarray turns a scalar into an array of one.
    ordered = {name: np.asarray(stored[name], order="C") for name in sorted(stored)}
    floats = bool(ordered) and all(array.dtype == _FLOAT for array in ordered.values())
    return _pieces_of_floats(ordered) if floats else [bytes(_save(ordered))]


def _pieces_of_floats(floats: Mapping[str, Array]) -> list[Piece]:
    """Return the safetensors bytes of float32 arrays as a header and one view per array."""
    header, end = {}, 0
    for name, array in floats.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (end, end + array.nbytes)}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    bodies = [array.reshape(-1).data.cast("B") for array in floats.values() if array.size]
    return [len(text).to_bytes(8, "little") + text, *bodies]


def load(data: bytes, max_bits: int = MAX_MASK_BITS) -> Arrays:
    """Return the arrays in the bytes of :func:`dump`. Masks are packed.

    Args:
        data: Safetensors bytes.
        max_bits: Most entries of all masks that are stored as gaps. A few bytes can encode a mask of any size.

    Raises:
        ProtocolError: The bytes are no valid safetensors, a name occurs twice or is reserved, gaps are malformed, or
            the masks have too many entries.
    """
    try:
        stored = _load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"tensor bytes are not valid safetensors ({error}); write them with a safetensors library"
        ) from error
    arrays: Arrays = {}
    for entry, array in stored.items():
        name, count = _name_and_count(entry)
        if name in arrays:
            raise ProtocolError(f"a blob holds tensor {name!r} twice; send it once", name=name)
        if count is not None:
            if count > max_bits:
                raise ProtocolError(
                    f"mask {name!r} has {count} entries where at most {max_bits} are left for the masks of this blob; "
                    f"send a smaller mask or raise max_bits",
                    name=name,
                    count=count,
                    limit=max_bits,
                )
            max_bits -= count
            array = _unpack_gaps(name, array, count)  # noqa: PLW2901
        arrays[name] = array
    return arrays


def check_bare(data: bytes, most_header: int) -> None:
    """Check that safetensors bytes contain only tensors.

    :func:`load` ignores ``__metadata__`` and padding, but a server that stores the bytes would store these too.

    Args:
        data: Safetensors bytes.
        most_header: Most bytes of the header.

    Raises:
        ProtocolError: The header has more than ``most_header`` bytes, or contains ``__metadata__``.
    """
    length = int.from_bytes(data[:8], "little")
    if length > most_header:
        raise ProtocolError(
            f"the header of the tensors takes {length} bytes, more than the {most_header} that their names need: send the "
            "tensors and nothing else",
            limit=most_header,
        )
    try:
        notes = "__metadata__" in json.loads(data[8 : 8 + length])
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"tensor bytes are not valid safetensors ({error}); write them with a safetensors library"
        ) from error
    if notes:
        raise ProtocolError(
            "the tensors come with __metadata__, which is no part of an update: send the tensors and nothing else"
        )


def _name_and_count(entry: str) -> tuple[str, int | None]:
    """Return (name of the tensor, number of bits of the mask that the entry stores as gaps, or None if it stores no
    gaps).

    Raises:
        ProtocolError: The entry's name marks an unknown encoding.
    """
    if _RESERVED not in entry:
        return entry, None
    match = _GAPS.fullmatch(entry)
    if match is None:
        raise ProtocolError(
            f"a blob holds {entry!r}, and {_RESERVED!r} marks an encoding that this version does not know; "
            f"update this side or rename the tensor",
            name=entry,
        )
    return match[1], int(match[2])


def _unpack_gaps(name: str, gaps: Array, count: int) -> Array:
    """Return the packed mask of ``count`` bits that is stored as gaps.

    Raises:
        ProtocolError: The gaps are malformed.
    """
    if gaps.dtype != np.uint8 or gaps.ndim != 1:
        raise ProtocolError(
            f"the gaps of mask {name!r} are uint8 in one dimension, not {gaps.dtype} {list(gaps.shape)}; "
            f"send the blob again",
            name=name,
        )
    return bits.from_gaps(gaps.tobytes(), count)
