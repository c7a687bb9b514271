"""Blobs: references and their chunks, references that must be refused, frames, and masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.wire import bits
from edgefl.wire.blobs import BlobRef, compress, describe, split

_BYTES = bytes(range(250)) * 4


def blob_vectors() -> dict[str, list[dict[str, Any]]]:
    """Return lists of cases by topic; all bytes are hexadecimal."""
    return {
        "chunks": [
            _cut(_BYTES[:size], chunk) for size, chunk in ((0, 4), (4, 4), (5, 4), (1000, 256), (1000, 4096))
        ],
        "refused": _refused(),
        "frames": _frames(),
        "masks": [_mask(places, count) for places, count in _MASKS],
    }


def _cut(data: bytes, chunk: int) -> dict[str, Any]:
    ref = describe(data, chunk)
    return {"blob": data.hex(), "ref": _plain(ref), "chunks": [piece.hex() for piece in split(data, chunk)]}


def _refused() -> list[dict[str, Any]]:
    good = _plain(describe(_BYTES, 256))
    wrong = {
        "a chunk of no bytes": {"chunk": 0},
        "a negative size": {"size": -1},
        "a digest that is missing": {"digests": good["digests"][:-64]},
        "a digest in capital letters": {"sha256": good["sha256"].upper()},
        "a digest that is too short": {"sha256": good["sha256"][:-2]},
        "a codec without the size of what it unfolds to": {"codec": "zstd"},
        "such a size without a codec": {"raw": 1000},
        "a codec that nobody knows": {"codec": "snappy", "raw": 1000},
    }
    return [{"why": why, "ref": {**good, **fields}} for why, fields in wrong.items()]


def _frames() -> list[dict[str, Any]]:
    data = b"edgefl, " * 200
    ref, frame = compress(data, 1 << 17)
    more = describe(frame + b"\x00", 1 << 17, raw=len(data))
    cut = describe(frame[:-1], 1 << 17, raw=len(data))
    lies = describe(frame, 1 << 17, raw=len(data) - 1)
    return [
        {"why": "", "ref": _plain(ref), "frame": frame.hex(), "blob": data.hex()},
        {"why": "bytes behind the frame", "ref": _plain(more), "frame": (frame + b"\x00").hex()},
        {"why": "a frame that is cut short", "ref": _plain(cut), "frame": frame[:-1].hex()},
        {"why": "a content of another size", "ref": _plain(lies), "frame": frame.hex()},
    ]


_MASKS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 500, 999), 1000),
    ((0,), 1000),
    ((), 12),
    ((0, 127, 255, 16_640), 20_000),
    (tuple(range(0, 20, 2)), 20),
)


def _mask(places: tuple[int, ...], count: int) -> dict[str, Any]:
    packed_mask = bits.pack(np.isin(np.arange(count), places))
    gaps = bits.to_gaps(packed_mask, count)
    return {
        "set": list(places),
        "count": count,
        "packed": packed_mask.tobytes().hex(),
        "gaps": gaps.hex(),
        "travels_as": "gaps" if len(gaps) < packed_mask.size else "packed",
    }


def _plain(ref: BlobRef) -> dict[str, Any]:
    """Return a reference for JSON, with hexadecimal digests."""
    fields = {name: getattr(ref, name) for name in ("sha256", "size", "chunk", "codec", "raw")}
    return {**fields, "digests": ref.digests.hex()}
