"""New lines of a run's feed, as they come."""

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
"""Bytes that are read before whoever asked has its turn again."""


class Told(msgspec.Struct, frozen=True):
    """A line of the feed: when, in epoch seconds, and what."""

    at: float
    event: AnyEvent


_decode = msgspec.json.Decoder(Told).decode


def told(line: bytes) -> Told | None:
    """None for what cannot be read: half a line of a killed server, or news of a later release."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Tail:
    """Follows the feed in ``folder`` over rotations and new runs, from its oldest line on."""

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
        """The lines that are new, as far as they are whole."""
        if self._old:
            self._old = False
            older = self._folder / feed.BEFORE
            yield from older.read_bytes().splitlines() if older.exists() else ()
        while self._ready():
            assert self._file is not None
            replaced = self._replaced()  # before it is read: nobody writes to it any more
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
        """Whether another file has the name: this one was full, or another run begins."""
        inode = _inode(self._folder / feed.NAME)
        return inode not in (0, self._inode)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
