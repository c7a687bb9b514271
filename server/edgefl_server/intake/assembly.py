"""Puts the chunks of updates together, for many untrusted devices, in bounded memory."""

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

LEAST_PIECE = 256
"""Bytes that every chunk but the last must hold: a device may not cut its update into more pieces than that."""

PIECE_BYTES = 256
PARTIAL_BYTES = 2048
"""What a piece, and an update that is not whole, take in memory beside the bytes of the update."""

_NONCE_LETTERS = 64
_DIGEST_LETTERS = 64

MOST_NAMED = 1024
"""Chunks named as missing at a time."""

MOST_DAMAGED = 3
"""Times in a round that a device may send an update again that came whole and with another digest."""


@dataclass(frozen=True)
class Complete:
    """All chunks are in, and the bytes are those the device named."""

    sha256: str
    data: bytes


@dataclass(frozen=True)
class Missing:
    """The last chunk is in, others are not (or the whole was damaged): what to send, ending with the last chunk
    where there is more than can be named, so that the rest is named then. ``text`` says what was damaged."""

    indices: list[int]
    text: str = ""


@dataclass
class _Partial:
    head: UpdateChunk
    pieces: dict[int, bytes] = field(default_factory=dict)
    held: int = 0

    @property
    def memory(self) -> int:
        return self.held + PIECE_BYTES * len(self.pieces) + PARTIAL_BYTES


class Assembly:
    """At most one unfinished update per device, at most ``most_bytes`` over all: the least recently fed goes first.

    ``held_bytes`` is all that they take in memory, ``forgotten`` the number of those that had to go.
    """

    def __init__(self, *, update_bytes: int, most_bytes: int, least_piece: int = LEAST_PIECE) -> None:
        self._least_piece = max(1, least_piece)
        self._damaged: dict[str, int] = {}
        self._update_bytes = update_bytes
        self._most_bytes = most_bytes
        self._partial: OrderedDict[str, _Partial] = OrderedDict()
        self.held_bytes = 0
        self.forgotten = 0

    def gaps(self, device: str, chunk: UpdateChunk) -> list[int]:
        """What is missing of the update that ``chunk`` is of, as far as it may be named at a time."""
        partial = self._partial.get(device)
        known = partial.pieces if partial is not None and _same(partial.head, chunk) else {}
        return _gaps(chunk.count, known)

    def add(self, device: str, chunk: UpdateChunk) -> Complete | Missing | None:
        """Take a chunk; a duplicate changes nothing, another ``sha256`` replaces the update in progress.

        Raises UpdateRejected for a chunk that cannot be part of an acceptable update.
        """
        self.check(chunk)
        partial = self._partial.get(device)
        if partial is None or not _same(partial.head, chunk):
            self.drop(device)
            head = msgspec.structs.replace(chunk, data=b"")
            partial = self._partial[device] = _Partial(head)
            self.held_bytes += partial.memory
        self._partial.move_to_end(device)
        if chunk.index not in partial.pieces:
            partial.pieces[chunk.index] = chunk.data
            partial.held += len(chunk.data)
            self.held_bytes += len(chunk.data) + PIECE_BYTES
        if partial.held > chunk.size:
            self.drop(device)
            raise _malformed("its chunks hold more bytes than it has")
        if len(partial.pieces) == chunk.count:
            return self._complete(device, partial)
        self._make_room()
        return Missing(_gaps(chunk.count, partial.pieces)) if chunk.index == chunk.count - 1 else None

    def holds(self, device: str, chunk: UpdateChunk) -> bool:
        """Whether the device's unfinished update has this very piece."""
        partial = self._partial.get(device)
        if partial is None or not _same(partial.head, chunk):
            return False
        return partial.pieces.get(chunk.index) == chunk.data

    def drop(self, device: str) -> None:
        """Forget the device's unfinished update."""
        partial = self._partial.pop(device, None)
        self.held_bytes -= partial.memory if partial else 0

    def forget(self, device: str) -> None:
        """The device's task is over: what came for it, and how often it came damaged."""
        self.drop(device)
        self._damaged.pop(device, None)

    def clear(self) -> None:
        """Forget all of them: the round is over."""
        self._partial.clear()
        self._damaged.clear()
        self.held_bytes = 0

    def check(self, chunk: UpdateChunk) -> None:
        """UpdateRejected for what is no piece, and no offer, of an acceptable update."""
        if len(chunk.sha256) != _DIGEST_LETTERS or len(chunk.nonce) > _NONCE_LETTERS:
            raise _malformed(
                f"its sha256 has {len(chunk.sha256)} letters and its nonce {len(chunk.nonce)}: they have {_DIGEST_LETTERS} "
                f"and at most {_NONCE_LETTERS}"
            )
        if chunk.size > self._update_bytes:
            raise UpdateRejected(
                "too-large",
                f"the update has {chunk.size} bytes, more than the limit of {self._update_bytes}: "
                "raise limits.max_update_bytes or train a smaller tier",
                size=chunk.size,
            )
        if not 0 <= chunk.index < chunk.count:
            raise _malformed(f"it has chunk {chunk.index} of {chunk.count}: chunks are counted from 0")
        crumbs = f"every chunk but the last has at least {self._least_piece} bytes"
        if chunk.count > max(0, chunk.size) // self._least_piece + 1:
            raise _malformed(f"it has {chunk.size} bytes in {chunk.count} chunks: {crumbs}")
        if not chunk.is_offer and chunk.index < chunk.count - 1 and len(chunk.data) < self._least_piece:
            raise _malformed(f"chunk {chunk.index} of {chunk.count} has {len(chunk.data)} bytes: {crumbs}")

    def _complete(self, device: str, partial: _Partial) -> Complete | Missing:
        self.drop(device)
        head, pieces = partial.head, partial.pieces
        whole = BytesIO()  # which gives out its own bytes in place of a copy
        for index in range(head.count):
            whole.write(pieces.pop(index))
        data = whole.getvalue()
        if len(data) != head.size:
            raise _malformed(f"it should have {head.size} bytes, found {len(data)}")
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == head.sha256:
            return Complete(sha256, data)
        damage = f"the {len(data)} bytes that came have the digest {sha256[:12]}, not {head.sha256[:12]}"
        self._damaged[device] = self._damaged.get(device, 0) + 1
        if self._damaged[device] > MOST_DAMAGED:
            raise _malformed(damage)
        return Missing(_gaps(head.count, {}), f"{damage}: send all chunks again")

    def _make_room(self) -> None:
        """Forget those that were fed longest ago; the device that was fed last is the last of them."""
        while self.held_bytes > self._most_bytes and len(self._partial) > 1:
            self.drop(next(iter(self._partial)))
            self.forgotten += 1


def _same(one: UpdateChunk, other: UpdateChunk) -> bool:
    return (one.nonce, one.sha256, one.count, one.size) == (
        other.nonce,
        other.sha256,
        other.count,
        other.size,
    )


def _gaps(count: int, pieces: Mapping[int, bytes]) -> list[int]:
    """Indices not in ``pieces``: all, or as many as may be named with the last index as the last of them."""
    gaps = list(islice((index for index in range(count) if index not in pieces), MOST_NAMED + 1))
    return gaps if len(gaps) <= MOST_NAMED else [*gaps[: MOST_NAMED - 1], count - 1]


def _malformed(why: str) -> UpdateRejected:
    return UpdateRejected("malformed", f"the update is malformed: {why}; drop it, and take the next task")
