"""Event feed of a server for its users: ``events.jsonl`` in the run's folder, one event and its time per line.

    {"at":1700000000.5,"event":{"event":"roundopened","round":1,...}}

The run does not depend on the feed. A thread writes it several times a second, and only the newest progress of each
device, so an event costs the server no more than an append. The size is bounded: a full file is renamed to
``events.1.jsonl``, which replaces the earlier one. Fields with default values are left out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from edgefl.system.clock import Clock
from edgefl_server import events
from edgefl_server.events import Event, Warned

NAME, BEFORE = "events.jsonl", "events.1.jsonl"
MOST_BYTES = 32 << 20
"""Size at which a file is replaced by a new one. Two files exist at most."""
_PAUSE_S = 0.25
_PROGRESS_S = 1.0
"""Shortest time between two written progress events of a device."""


class FeedWriter:
    """Writer of the event feed in ``folder``, on a thread of its own.

    Args:
        folder: Folder of the run.
        clock: Epoch seconds, for the time of an event.
        most_bytes: Size at which the file is renamed and a new one begins.
    """

    def __init__(self, folder: Path, clock: Clock = time.time, *, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._clock = clock
        self._most_bytes = most_bytes
        self._pending: list[tuple[float, Event]] = []
        self._progress: dict[str, tuple[float, events.DeviceSeen]] = {}
        self._progress_due = 0.0
        self._lock = threading.Lock()
        self._problem = ""
        self._has_warned = False
        self._ended = threading.Event()
        self._is_started = False
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> Warned | None:
        """Queue ``event`` for the feed. Return a warning, once, if an earlier write failed; otherwise None."""
        now = self._clock()
        with self._lock:
            if isinstance(event, events.DeviceSeen) and event.stage != events.REPORTED:
                self._progress[event.device] = now, event
            else:
                # Earlier progress of a device must not follow its result in the log.
                device = getattr(event, "device", None)
                if device is None and isinstance(event, events.RoundOpened):
                    self._pending += self._progress.values()
                    self._progress.clear()
                elif device in self._progress:
                    self._pending.append(self._progress.pop(device))
                self._pending.append((now, event))
        if not self._problem or self._has_warned:
            return None
        self._has_warned = True
        return Warned(tier="", text=self._problem)

    def close(self) -> None:
        """Write the queued events and end the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            self._write(all_of_it=False)
        self._write(all_of_it=True)

    def _write(self, *, all_of_it: bool) -> None:
        lines = b"".join(_line(at, event) for at, event in self._take_due(all_of_it=all_of_it))
        if not lines:
            return
        path = self._folder / NAME
        try:
            if path.exists() and path.stat().st_size > self._most_bytes:
                path.replace(self._folder / BEFORE)
            with path.open("ab") as file:
                file.write(lines if self._is_started else b"\n" + lines)  # begins anew behind half a line
            self._is_started = True
        except OSError as error:
            self._problem = f"{path} lacks events ({error.strerror or error}), and the fleet's page with it: free some space"

    def _take_due(self, *, all_of_it: bool) -> list[tuple[float, Event]]:
        """Remove and return the queued (epoch seconds, event) pairs that are due.

        Progress of devices is due once a second, or with ``all_of_it`` now; then the pairs are sorted by time.
        """
        now = time.monotonic()
        with self._lock:
            due: list[tuple[float, Event]] = self._pending
            self._pending = []
            if all_of_it or now >= self._progress_due:
                due = sorted([*due, *self._progress.values()], key=lambda each: each[0])
                self._progress = {}
                self._progress_due = now + _PROGRESS_S
        return due


def begin(folder: Path) -> None:
    """Create ``folder`` and an empty feed in it, so that readers recognize the folder of a run. An existing feed stays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).touch()


_encode = msgspec.json.Encoder().encode


def _line(at: float, event: Event) -> bytes:
    if isinstance(event, events.UpdateAccepted):  # the audit log has these
        event = msgspec.structs.replace(event, nonce="", sha256="")
    return (
        _encode({"at": at, "event": {"event": type(event).__struct_config__.tag, **_set_fields(event)}})
        + b"\n"
    )


def _set_fields(event: Event) -> dict[str, Any]:
    """Return the fields of ``event`` that differ from their defaults, by name.

    Fields with the value NaN or infinity are left out, because JSON cannot hold them.
    """
    kind = type(event)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    found: dict[str, Any] = {}
    for at, name in enumerate(kind.__struct_fields__):
        value = getattr(event, name)
        default = kind.__struct_defaults__[at - required] if at >= required else None
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if at < required or (value != default and value not in ({}, ())):
            found[name] = value
    return found


AnyEvent = (
    events.Started | events.Exporting | events.Compiled | events.Warned | events.Noted | events.Waiting
    | events.Offline | events.Online | events.DeviceJoined | events.DeviceLost | events.DeviceFailed
    | events.DeviceFitness | events.RolloutStarted | events.RolloutJudged
    | events.Awaiting | events.RoundOpened | events.DeviceSeen | events.UpdateAccepted | events.Rejected
    | events.ParticipationDeclined | events.Limited | events.Vitals | events.Ordered | events.Refused | events.RoundEnded
    | events.RolledBack | events.RoundClosed | events.Stopped | events.Finished
)  # fmt: skip

_MOST_AT_ONCE = 4 << 20
"""Number of bytes that are read at a time, so that the caller can interrupt."""


class FeedEvent(msgspec.Struct, frozen=True):
    """Line of the feed: an event and its time in epoch seconds."""

    at: float
    event: AnyEvent


_decode = msgspec.json.Decoder(FeedEvent).decode


def decode_event(line: bytes) -> FeedEvent | None:
    """Decode a line of the feed. Return None if it is incomplete, invalid, or of a later release."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class FeedReader:
    """Reader that follows the event feed in ``folder`` from its oldest line, across renamed files and new runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._inode = 0
        self._rest = b""
        self._old = True

    def close(self) -> None:
        """Close the open file of the feed. The reader must not be used afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that are new since the last call, without their newline.

        The first call begins with the oldest line. An incomplete last line is yielded by a later call. Empty lines are
        possible.
        """
        if self._old:
            self._old = False
            older = self._folder / BEFORE
            yield from older.read_bytes().splitlines() if older.exists() else ()
        while self._ready():
            assert self._file is not None
            replaced = self._is_replaced()  # checked before reading: a replaced file no longer grows
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
                self._file = (self._folder / NAME).open("rb")
            except OSError:
                return False
            self._inode = _inode(self._folder / NAME)
        return True

    def _is_replaced(self) -> bool:
        """Return True if the name of the open feed now refers to another file, after a rename or the start of another
        run.
        """
        inode = _inode(self._folder / NAME)
        return inode not in (0, self._inode)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
