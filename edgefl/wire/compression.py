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
_LEAST_WINDOW_LOG, _MOST_WINDOW_LOG = 10, 27  # of zstd's format, and what every decoder must take
_CHANGES_LEVEL = 19  # made once, read by every device


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


def packed_beside(base: bytes, data: bytes) -> bytes:
    """A zstd frame of ``data`` that reads what is alike in ``base``: of a few changes, a few bytes."""
    zstd = _zstd()
    options = {zstd.CompressionParameter.window_log: _window_log(len(base) + len(data))}
    options[zstd.CompressionParameter.compression_level] = _CHANGES_LEVEL
    small: bytes = zstd.compress(data, options=options, zstd_dict=zstd.ZstdDict(base, is_raw=True).as_prefix)
    return small


def unpacked_beside(base: bytes, frame: bytes, raw: int) -> bytes:
    """What :func:`packed_beside` was given; BundleError if that is not ``raw`` bytes, which nothing more is made of."""
    zstd = _zstd()
    most = {zstd.DecompressionParameter.window_log_max: _window_log(len(base) + raw)}
    try:
        known = zstd.ZstdDict(base, is_raw=True).as_prefix
        reader = zstd.ZstdDecompressor(options=most, zstd_dict=known)
        content: bytes = reader.decompress(frame, raw + 1)
    except (zstd.ZstdError, ValueError) as error:
        raise BundleError(
            f"a variant is no zstd frame beside its graph ({error}); export the bundle again"
        ) from error
    if not reader.eof or reader.unused_data or len(content) != raw:
        raise BundleError(f"a variant does not unfold to {raw} bytes; export the bundle again")
    return content


def _window_log(count: int) -> int:
    return min(max((count - 1).bit_length(), _LEAST_WINDOW_LOG), _MOST_WINDOW_LOG)


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
