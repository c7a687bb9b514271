"""Immutable bytes named by their SHA-256, and the chunks that carry them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from edgefl.wire.errors import BundleError
from edgefl.wire.limits import MOST_CHUNK_BYTES

DIGEST_BYTES = 32
SHA256 = re.compile(r"[0-9a-f]{64}")


class BlobRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Name and shape of a blob as it travels. ``digests`` holds the raw SHA-256 of each chunk, concatenated.

    It is empty for a blob of one chunk, whose digest is the blob's own. With ``codec`` the bytes that travel are a zstd
    frame of ``raw`` bytes (:func:`edgefl.wire.compression.unpacked`); ``sha256``, ``size`` and ``digests`` are the frame's.
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
        if self.count == 1:
            return bytes.fromhex(self.sha256)
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def accepts(self, index: int, data: bytes) -> bool:
        """Return True if ``data`` is chunk ``index`` of this blob, by its length and its digest."""
        if not 0 <= index < self.count or len(data) != min(self.chunk, self.size - index * self.chunk):
            return False
        return hashlib.sha256(data).digest() == self.chunk_digest(index)

    def _consistent(self) -> bool:
        expected = 0 if self.count == 1 else self.count * DIGEST_BYTES
        unfolds = self.raw > 0 if self.codec else self.raw == 0
        return SHA256.fullmatch(self.sha256) is not None and len(self.digests) == expected and unfolds

    def check(self, limit: int) -> None:
        """Raise BundleError if the reference contradicts itself or exceeds ``limit`` bytes, also unfolded."""
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
    """The reference of ``data`` cut into chunks of ``chunk`` bytes; ``raw``: what it unfolds to if it is a zstd frame."""
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
    """Chunks of ``data`` in order; one empty chunk for empty data."""
    for start in range(0, max(1, len(data)), chunk):
        yield data[start : start + chunk]


def verified(ref: BlobRef, data: bytes) -> bytes:
    """``data`` if its size and digest are those of ``ref``, else BundleError."""
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise BundleError(
            f"blob {ref.sha256[:12]} is damaged: {len(data)} of {ref.size} bytes, digest differs; fetch it again",
            sha256=ref.sha256,
        )
    return data
