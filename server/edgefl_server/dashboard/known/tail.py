"""Reader of a run's feed, line by line as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from edgefl_server import events
from edgefl_server.storage import feed

AnyEvent = (
    events.Started | events.Exporting | events.Compiled | events.Warned | events.Noted | events.Waiting
    | events.Offline | events.Online | events.DeviceJoined | events.DeviceLost | events.DeviceFailed
    | events.DeviceFitness | events.RolloutStarted | events.RolloutJudged
    | events.Awaiting | events.RoundOpened | events.DeviceSeen | events.UpdateAccepted | events.Rejected
    | events.Declined | events.Limited | events.Vitals | events.Ordered | events.Refused | events.RoundEnded
    | events.RolledBack | events.RoundClosed | events.Stopped | events.Finished
)  # fmt: skip

_MOST_AT_ONCE = 4 << 20
"""Bytes that are read at a time, so that the caller can interrupt."""


class FeedEvent(msgspec.Struct, frozen=True):
    """Line of the feed: an event and its time in epoch seconds."""

    at: float
    event: AnyEvent


_decode = msgspec.json.Decoder(FeedEvent).decode


def decode_event(line: bytes) -> FeedEvent | None:
    """Return the event of a line. None if it is invalid, such as half a line of a killed server, or of a later release."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class FeedReader:
    """Reader that follows the feed in ``folder`` over rotations and new runs, from its oldest line on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._inode = 0
        self._rest = b""
        self._old = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[bytes]:
        """Yield the new lines that are complete."""
        if self._old:
            self._old = False
            older = self._folder / feed.BEFORE
            yield from older.read_bytes().splitlines() if older.exists() else ()
        while self._ready():
            assert self._file is not None
            replaced = self._replaced()  # checked before reading: a replaced file no longer grows
            data = self._file.read(_MOST_AT_ONCE)
            if not data:
                if not replaced:
                    return
                self.close()
                self._rest = b""
                continue
            whole, newline, rest = (self._rest + data).rpartition(b"\n")
            self._rest = rest
            if newline:
                yield from whole.split(b"\n")

    def _ready(self) -> bool:
        if self._file is None:
            try:
                self._file = (self._folder / feed.NAME).open("rb")
            except OSError:
                return False
            self._inode = _inode(self._folder / feed.NAME)
        return True

    def _replaced(self) -> bool:
        """Return True if another file has the name, because this one was full or another run began."""
        inode = _inode(self._folder / feed.NAME)
        return inode not in (0, self._inode)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
