"""Puts the chunks of updates together, for many untrusted devices, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from edgefl.wire.errors import UpdateRejected
from edgefl.wire.messages import UpdateChunk


@dataclass(frozen=True)
class Complete:
    """All chunks are in, and the bytes are those the device named."""

    sha256: str
    data: bytes


@dataclass(frozen=True)
class Missing:
    """The last chunk is in, others are not."""

    indices: list[int]


@dataclass
class _Partial:
    head: UpdateChunk
    pieces: dict[int, bytes] = field(default_factory=dict)
    held: int = 0


class Assembly:
    """At most one unfinished update per device, at most ``most_bytes`` over all: the least recently fed goes first."""

    def __init__(self, *, update_bytes: int, most_bytes: int) -> None:
        self._update_bytes = update_bytes
        self._most_bytes = most_bytes
        self._partial: OrderedDict[str, _Partial] = OrderedDict()
        self.held_bytes = 0

    def add(self, device: str, chunk: UpdateChunk) -> Complete | Missing | None:
        """Take a chunk; a duplicate changes nothing, another ``sha256`` replaces the update in progress.

        Raises UpdateRejected for a chunk that cannot be part of an acceptable update.
        """
        self._check(chunk)
        partial = self._partial.get(device)
        if partial is None or not _same(partial.head, chunk):
            self.drop(device)
            partial = self._partial[device] = _Partial(chunk)
        self._partial.move_to_end(device)
        if chunk.index not in partial.pieces:
            partial.pieces[chunk.index] = chunk.data
            partial.held += len(chunk.data)
            self.held_bytes += len(chunk.data)
        if partial.held > chunk.size:
            self.drop(device)
            raise _malformed("its chunks hold more bytes than it has")
        if len(partial.pieces) == chunk.count:
            return self._complete(device, partial)
        self._make_room(device)
        gaps = [index for index in range(chunk.count) if index not in partial.pieces]
        return Missing(gaps) if chunk.index == chunk.count - 1 else None

    def drop(self, device: str) -> None:
        """Forget the device's unfinished update."""
        partial = self._partial.pop(device, None)
        self.held_bytes -= partial.held if partial else 0

    def clear(self) -> None:
        """Forget all of them: the round is over."""
        self._partial.clear()
        self.held_bytes = 0

    def _check(self, chunk: UpdateChunk) -> None:
        if chunk.size > self._update_bytes:
            raise UpdateRejected(
                "too-large",
                f"the update has {chunk.size} bytes, more than the limit of {self._update_bytes}: "
                "raise limits.max_update_bytes or train a smaller tier",
                size=chunk.size,
            )
        if not 0 <= chunk.index < chunk.count or not 0 < chunk.count <= max(1, chunk.size):
            raise _malformed(f"it has chunk {chunk.index} of {chunk.count} with {chunk.size} bytes in all")

    def _complete(self, device: str, partial: _Partial) -> Complete:
        self.drop(device)
        data = b"".join(partial.pieces[index] for index in range(partial.head.count))
        if len(data) != partial.head.size or hashlib.sha256(data).hexdigest() != partial.head.sha256:
            raise _malformed(f"its {len(data)} bytes do not have the digest {partial.head.sha256[:12]}")
        return Complete(partial.head.sha256, data)

    def _make_room(self, device: str) -> None:
        while self.held_bytes > self._most_bytes and len(self._partial) > 1:
            oldest = next(iter(self._partial))
            self.drop(oldest if oldest != device else next(reversed(self._partial)))


def _same(one: UpdateChunk, other: UpdateChunk) -> bool:
    return (one.nonce, one.sha256, one.count, one.size) == (
        other.nonce,
        other.sha256,
        other.count,
        other.size,
    )


def _malformed(why: str) -> UpdateRejected:
    return UpdateRejected("malformed", f"the update is malformed: {why}; send it again whole")
