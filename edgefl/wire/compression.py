"""zstd for blobs: what travels compressed, and unfolding it without believing what its frame says.

The library, which is Python's own from 3.14 on, is loaded with the first compressed blob: a device that gets none does
not pay for it.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.errors import BundleError

Compression = Literal["zstd", "none"]

LEAST_SAVED = 0.03
"""Share of the bytes that compression must save, or a blob travels as it is."""

_LEVEL = 3
_LEAST_WINDOW_LOG = 10  # of zstd's format


def packed(data: bytes, chunk: int, compression: Compression = "zstd") -> tuple[BlobRef, bytes]:
    """(reference, the bytes that travel), compressed where that saves at least LEAST_SAVED."""
    if compression == "zstd" and data:
        small: bytes = _zstd().compress(data, _LEVEL)
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
    zstd = _zstd()
    window_log = max((ref.raw - 1).bit_length(), _LEAST_WINDOW_LOG)
    try:
        claimed = zstd.get_frame_info(data).decompressed_size
        if claimed != ref.raw:
            raise _refused(ref, f"its frame claims {claimed} bytes")
        reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
        content: bytes = reader.decompress(data, ref.raw + 1)  # one more, or the frame's end stays unread
    except zstd.ZstdError as error:
        raise _refused(ref, str(error)) from error
    if not reader.eof or reader.unused_data:
        raise _refused(ref, "it is cut off, or something follows it")
    if len(content) != ref.raw:
        raise _refused(ref, f"it unfolds to {len(content)} bytes")
    return content


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _refused(ref: BlobRef, why: str) -> BundleError:
    return BundleError(
        f"blob {ref.sha256[:12]} is no zstd frame of {ref.raw} bytes ({why}); the server must publish it again",
        sha256=ref.sha256,
        raw=ref.raw,
    )
