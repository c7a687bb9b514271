"""Reassembly of updates from their chunks, for many untrusted devices, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice

import msgspec

from edgefl.errors import UpdateRejected
from edgefl.wire.mqtt.messages import UpdateChunk

MIN_CHUNK_BYTES = 256
"""Smallest size of every chunk but the last, which bounds the number of chunks of an update."""
CHUNK_OVERHEAD_BYTES = 256
UPDATE_OVERHEAD_BYTES = 2048
"""Memory of a chunk, and of an unfinished update, besides the update's bytes."""
MAX_MISSING = 1024
"""Largest number of missing chunks in one request."""
MAX_DAMAGED = 3
"""Number of times per round that a device may repeat an update that arrived with another digest than declared."""
_NONCE_LETTERS = 64
_DIGEST_LETTERS = 64


@dataclass(frozen=True)
class ReassembledUpdate:
    """Complete update: its encoded bytes ``data``, and their digest ``sha256``, which equals the declared one."""

    sha256: str
    data: bytes


@dataclass(frozen=True)
class MissingChunks:
    """Chunks to request from a device because they are missing, or because the complete update has a wrong digest.

    Attributes:
        indices: Their indices. If there are more than :data:`MAX_MISSING`, the last chunk is included: its arrival
            triggers the next request.
        text: Description of the damage, or empty.
    """

    indices: list[int]
    text: str = ""


@dataclass
class _PartialUpdate:
    """Unfinished update.

    Attributes:
        head: Its first received chunk without the data; it describes the update.
        chunks: Data of the chunks so far, by index.
        nbytes: Sum of their sizes.
    """

    head: UpdateChunk
    chunks: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def memory(self) -> int:
        return self.nbytes + CHUNK_OVERHEAD_BYTES * len(self.chunks) + UPDATE_OVERHEAD_BYTES


class ChunkReassembler:
    """Store of unfinished updates, at most one per device, which joins the chunks of each.

    If they exceed ``max_bytes``, the updates without a new chunk for the longest time are dropped.

    Args:
        max_update_bytes: Limit of one update.
        max_bytes: Limit of all unfinished updates, in bytes of memory.
        min_chunk_bytes: Smallest size of every chunk but the last.

    Attributes:
        held_bytes: Memory of all unfinished updates.
        dropped: Number of updates that were dropped because memory was short.
    """

    def __init__(
        self, *, max_update_bytes: int, max_bytes: int, min_chunk_bytes: int = MIN_CHUNK_BYTES
    ) -> None:
        self._min_chunk_bytes = max(1, min_chunk_bytes)
        self._max_update_bytes = max_update_bytes
        self._max_bytes = max_bytes
        self._damaged: dict[str, int] = {}
        self._partial: OrderedDict[str, _PartialUpdate] = OrderedDict()
        self.held_bytes = 0
        self.dropped = 0

    def missing(self, device: str, chunk: UpdateChunk) -> list[int]:
        """Return the indices of the missing chunks of the update that ``chunk`` belongs to.

        If more than :data:`MAX_MISSING` are missing, only the first ones and the last one are returned.
        """
        partial = self._partial.get(device)
        return _gaps(
            chunk.count, partial.chunks if partial is not None and _is_same(partial.head, chunk) else {}
        )

    def add(self, device: str, chunk: UpdateChunk) -> ReassembledUpdate | MissingChunks | None:
        """Add a chunk. A copy is ignored; a chunk of another update replaces the device's unfinished one.

        Returns:
            The update if it is complete. After its last chunk, or if the complete bytes are damaged, the chunks to
            request. None otherwise.

        Raises:
            UpdateRejected: If the chunk cannot be part of an acceptable update. The unfinished update is dropped if
                its sizes contradict each other.
        """
        self.check(chunk)
        partial = self._partial.get(device)
        if partial is None or not _is_same(partial.head, chunk):
            self.drop(device)
            partial = self._partial[device] = _PartialUpdate(msgspec.structs.replace(chunk, data=b""))
            self.held_bytes += partial.memory
        self._partial.move_to_end(device)
        if chunk.index not in partial.chunks:
            partial.chunks[chunk.index] = chunk.data
            partial.nbytes += len(chunk.data)
            self.held_bytes += len(chunk.data) + CHUNK_OVERHEAD_BYTES
        if partial.nbytes > chunk.size:
            self.drop(device)
            raise _malformed("its chunks hold more bytes than it has")
        if len(partial.chunks) == chunk.count:
            return self._join(device, partial)
        # The device that sent this chunk is the last in the order, so its own update stays.
        while self.held_bytes > self._max_bytes and len(self._partial) > 1:
            self.drop(next(iter(self._partial)))
            self.dropped += 1
        return MissingChunks(_gaps(chunk.count, partial.chunks)) if chunk.index == chunk.count - 1 else None

    def holds(self, device: str, chunk: UpdateChunk) -> bool:
        """Return True if the device's unfinished update has this chunk already, with the same bytes."""
        partial = self._partial.get(device)
        if partial is None or not _is_same(partial.head, chunk):
            return False
        return partial.chunks.get(chunk.index) == chunk.data

    def drop(self, device: str) -> None:
        """Drop the chunks of the device's unfinished update, if there is one."""
        partial = self._partial.pop(device, None)
        self.held_bytes -= partial.memory if partial else 0

    def forget(self, device: str) -> None:
        """Drop the device's unfinished update and its count of damaged updates, because its task is over."""
        self.drop(device)
        self._damaged.pop(device, None)

    def clear(self) -> None:
        """Drop all unfinished updates and the counts of damaged ones, because the round is over."""
        self._partial.clear()
        self._damaged.clear()
        self.held_bytes = 0

    def check(self, chunk: UpdateChunk) -> None:
        """Validate the fields of a chunk, or of an offer (a chunk without data), against the limits.

        Raises:
            UpdateRejected: If the chunk cannot belong to an acceptable update.
        """
        if len(chunk.sha256) != _DIGEST_LETTERS or len(chunk.nonce) > _NONCE_LETTERS:
            raise _malformed(
                f"its sha256 has {len(chunk.sha256)} letters and its nonce {len(chunk.nonce)}: they have {_DIGEST_LETTERS} "
                f"and at most {_NONCE_LETTERS}"
            )
        if chunk.size > self._max_update_bytes:
            raise UpdateRejected(
                "too-large",
                f"the update has {chunk.size} bytes, more than the limit of {self._max_update_bytes}: "
                "raise limits.max_update_bytes or train a smaller tier",
                size=chunk.size,
            )
        if not 0 <= chunk.index < chunk.count:
            raise _malformed(f"it has chunk {chunk.index} of {chunk.count}: chunks are counted from 0")
        minimum = f"every chunk but the last has at least {self._min_chunk_bytes} bytes"
        if chunk.count > max(0, chunk.size) // self._min_chunk_bytes + 1:
            raise _malformed(f"it has {chunk.size} bytes in {chunk.count} chunks: {minimum}")
        if not chunk.is_offer and chunk.index < chunk.count - 1 and len(chunk.data) < self._min_chunk_bytes:
            raise _malformed(f"chunk {chunk.index} of {chunk.count} has {len(chunk.data)} bytes: {minimum}")

    def _join(self, device: str, partial: _PartialUpdate) -> ReassembledUpdate | MissingChunks:
        self.drop(device)
        head = partial.head
        # BytesIO hands out its own buffer, so a large update is not copied; popped chunks free their memory meanwhile.
        buffer = BytesIO()
        for index in range(head.count):
            buffer.write(partial.chunks.pop(index))
        data = buffer.getvalue()
        if len(data) != head.size:
            raise _malformed(f"it should have {head.size} bytes, found {len(data)}")
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == head.sha256:
            return ReassembledUpdate(sha256, data)
        damage = f"the {len(data)} bytes that came have the digest {sha256[:12]}, not {head.sha256[:12]}"
        self._damaged[device] = self._damaged.get(device, 0) + 1
        if self._damaged[device] > MAX_DAMAGED:
            raise _malformed(damage)
        return MissingChunks(_gaps(head.count, {}), f"{damage}: send all chunks again")


def _is_same(one: UpdateChunk, other: UpdateChunk) -> bool:
    """Return True if two chunks belong to the same update: nonce, digest, number of chunks and size are equal."""
    return (one.nonce, one.sha256, one.count, one.size) == (
        other.nonce,
        other.sha256,
        other.count,
        other.size,
    )


def _gaps(count: int, chunks: Mapping[int, bytes]) -> list[int]:
    gaps = list(islice((index for index in range(count) if index not in chunks), MAX_MISSING + 1))
    return gaps if len(gaps) <= MAX_MISSING else [*gaps[: MAX_MISSING - 1], count - 1]


def _malformed(reason: str) -> UpdateRejected:
    return UpdateRejected("malformed", f"the update is malformed: {reason}; drop it, and take the next task")
