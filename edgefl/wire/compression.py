"""zstd for blobs: what travels compressed, and unfolding it without believing what its frame says.

zstandard is loaded with the first compressed blob: a device that gets none does not pay for it.
"""

from __future__ import annotations

from typing import Literal

from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.errors import BundleError

Compression = Literal["zstd", "none"]

LEAST_SAVED = 0.03
"""Share of the bytes that compression must save, or a blob travels as it is."""

_LEVEL = 3
_LEAST_WINDOW = 1 << 10  # of zstd's format


def packed(data: bytes, chunk: int, compression: Compression = "zstd") -> tuple[BlobRef, bytes]:
    """(reference, the bytes that travel), compressed where that saves at least LEAST_SAVED."""
    if compression == "zstd" and data:
        import zstandard

        small = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data)
        if len(small) <= (1.0 - LEAST_SAVED) * len(data):
            return describe(small, chunk, raw=len(data)), small
    return describe(data, chunk), data


def unpacked(ref: BlobRef, data: bytes, limit: int) -> bytes:
    """The blob's own bytes from ``data``, those that travelled and were verified.

    BundleError, before anything is allocated, if they would be more than ``limit`` or other than the reference says.
    """
    if not ref.codec:
        return data
    ref.check(limit)
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != ref.raw:
            raise _refused(ref, f"its frame claims {frame.content_size} bytes")
        window = max(ref.raw, _LEAST_WINDOW)
        found = zstandard.ZstdDecompressor(max_window_size=window).decompress(
            data, max_output_size=ref.raw, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise _refused(ref, str(error)) from error
    if len(found) != ref.raw:
        raise _refused(ref, f"it unfolds to {len(found)} bytes")
    return found


def _refused(ref: BlobRef, why: str) -> BundleError:
    return BundleError(
        f"blob {ref.sha256[:12]} is no zstd frame of {ref.raw} bytes ({why}); the server must publish it again",
        sha256=ref.sha256,
        raw=ref.raw,
    )
