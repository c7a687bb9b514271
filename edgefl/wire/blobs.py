"""Immutable bytes named by their SHA-256, the chunks that carry them, and their compression with zstd.

The zstd library (part of Python from 3.14 on) is imported with the first compressed blob, to save a device memory until
it needs one.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from edgefl.errors import BundleError
from edgefl.wire.limits import MOST_CHUNK_BYTES

DIGEST_BYTES = 32
SHA256 = re.compile(r"[0-9a-f]{64}")


class BlobRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reference to a blob: its digest, its size in bytes, and its division into chunks.

    Attributes:
        sha256: Hexadecimal digest of the transmitted bytes.
        size: Number of transmitted bytes.
        chunk: Bytes of each chunk, except for a shorter last one.
        digests: Raw SHA-256 of each chunk, concatenated. Empty for a blob of one chunk, whose digest is ``sha256``.
        codec: "zstd" if the transmitted bytes are a zstd frame (:func:`decompress`), "" if they are the content itself.
        raw: Size of the content in bytes if ``codec`` is set, else 0.
    """

    sha256: str
    size: int
    chunk: int
    digests: bytes = b""
    codec: Literal["", "zstd"] = ""
    raw: int = 0

    @property
    def count(self) -> int:
        """Number of chunks. An empty blob still has one (empty) chunk."""
        return max(1, -(-self.size // self.chunk))

    def chunk_digest(self, index: int) -> bytes:
        """Return the raw SHA-256 (32 bytes) of chunk ``index``, which must be below :attr:`count`."""
        if self.count == 1:
            return bytes.fromhex(self.sha256)
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def accepts(self, index: int, data: bytes) -> bool:
        """Return True if ``data`` has the length and the digest of chunk ``index``. An index out of range returns False."""
        if not 0 <= index < self.count or len(data) != min(self.chunk, self.size - index * self.chunk):
            return False
        return hashlib.sha256(data).digest() == self.chunk_digest(index)

    def _consistent(self) -> bool:
        expected = 0 if self.count == 1 else self.count * DIGEST_BYTES
        unfolds = self.raw > 0 if self.codec else self.raw == 0
        return SHA256.fullmatch(self.sha256) is not None and len(self.digests) == expected and unfolds

    def check(self, limit: int) -> None:
        """Check the reference before anything is fetched for it.

        Args:
            limit: Most bytes of the blob, both as transmitted and decompressed.

        Raises:
            BundleError: The fields contradict each other, or the blob is larger than ``limit``.
        """
        malformed = f"blob reference {self.sha256[:12]!r} is malformed; ask the server to publish it again"
        if self.size < 0 or self.chunk <= 0 or not self._consistent():
            raise BundleError(malformed)
        largest = max(self.size, self.raw)
        if largest > limit:
            raise BundleError(
                f"blob {self.sha256[:12]} has {largest} bytes, more than the limit of {limit}: "
                "raise limits.max_blob_bytes or give this device a smaller tier",
                size=largest,
                limit=limit,
            )
        if self.chunk > MOST_CHUNK_BYTES:
            raise BundleError(malformed)


def describe(data: bytes, chunk: int, *, raw: int = 0) -> BlobRef:
    """Return the reference of a blob, cut into chunks.

    Args:
        data: Bytes as they are transmitted.
        chunk: Bytes of one chunk.
        raw: Decompressed size if ``data`` is a zstd frame, else 0.
    """
    several = len(data) > chunk
    return BlobRef(
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        chunk=chunk,
        digests=b"".join(hashlib.sha256(piece).digest() for piece in split(data, chunk)) if several else b"",
        codec="zstd" if raw else "",
        raw=raw,
    )


def split(data: bytes, chunk: int) -> Iterator[bytes]:
    """Yield the chunks of ``data`` in order. Empty data have one empty chunk."""
    for start in range(0, max(1, len(data)), chunk):
        yield data[start : start + chunk]


def verify_blob(ref: BlobRef, data: bytes) -> bytes:
    """Return ``data`` unchanged after checking it against ``ref``.

    Raises:
        BundleError: ``data`` does not have the size and the digest of ``ref``.
    """
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise BundleError(
            f"blob {ref.sha256[:12]} is damaged: {len(data)} of {ref.size} bytes, digest differs; fetch it again",
            sha256=ref.sha256,
        )
    return data


Compression = Literal["zstd", "none"]

LEAST_SAVED = 0.03
"""Least share of the bytes that compression must save. Otherwise a blob travels as it is."""

_LEVEL = 3
_LEAST_WINDOW_LOG, _MOST_WINDOW_LOG = 10, 27  # of zstd's format, and what every decoder must take
_CHANGES_LEVEL = 19  # made once, read by every device


def compress(data: bytes, chunk: int, compression: Compression = "zstd") -> tuple[BlobRef, bytes]:
    """Return (reference of the blob, bytes to transmit).

    Args:
        data: Content of the blob.
        chunk: Bytes of one chunk.
        compression: "zstd" to compress if that saves at least :data:`LEAST_SAVED` of the bytes; "none" to
            transmit ``data`` itself.
    """
    if compression == "zstd" and data:
        small: bytes = _zstd().compress(data, _LEVEL)
        if len(small) <= (1.0 - LEAST_SAVED) * len(data):
            return describe(small, chunk, raw=len(data)), small
    return describe(data, chunk), data


def decompress(ref: BlobRef, data: bytes, limit: int) -> bytes:
    """Return the content of a blob.

    Args:
        ref: Reference of the blob.
        data: Transmitted bytes, already verified against ``ref``.
        limit: Most bytes of the content.

    Raises:
        BundleError: The frame is invalid, or its content is larger than ``limit`` or differs from ``ref.raw`` in size.
            A size above ``limit`` is detected before memory is allocated.
    """
    if not ref.codec:
        return data
    ref.check(limit)
    zstd = _zstd()
    window_log = max((ref.raw - 1).bit_length(), _LEAST_WINDOW_LOG)
    try:
        claimed = zstd.get_frame_info(data).decompressed_size
        if claimed != ref.raw:
            raise _frame_error(ref, f"its frame claims {claimed} bytes")
        reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
        content: bytes = reader.decompress(data, ref.raw + 1)  # one more, or the frame's end stays unread
    except zstd.ZstdError as error:
        raise _frame_error(ref, str(error)) from error
    if not reader.eof or reader.unused_data:
        raise _frame_error(ref, "it is cut off, or something follows it")
    if len(content) != ref.raw:
        raise _frame_error(ref, f"it unfolds to {len(content)} bytes")
    return content


def compress_against(base: bytes, data: bytes) -> bytes:
    """Return a zstd frame of ``data`` that uses ``base`` as its dictionary. It is small if ``data`` resembles ``base``."""
    zstd = _zstd()
    options = {zstd.CompressionParameter.window_log: _window_log(len(base) + len(data))}
    options[zstd.CompressionParameter.compression_level] = _CHANGES_LEVEL
    small: bytes = zstd.compress(data, options=options, zstd_dict=zstd.ZstdDict(base, is_raw=True).as_prefix)
    return small


def decompress_against(base: bytes, frame: bytes, raw: int) -> bytes:
    """Return the data that :func:`compress_against` compressed.

    Args:
        base: Dictionary that was used to compress.
        frame: Compressed bytes.
        raw: Expected number of decompressed bytes.

    Raises:
        BundleError: ``frame`` is no zstd frame for ``base``, or does not decompress to exactly ``raw`` bytes.
    """
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


def _frame_error(ref: BlobRef, why: str) -> BundleError:
    return BundleError(
        f"blob {ref.sha256[:12]} is no zstd frame of {ref.raw} bytes ({why}); the server must publish it again",
        sha256=ref.sha256,
        raw=ref.raw,
    )
