"""One measurement: server events and connections on one loop, so that nothing else takes part in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.fleet.federation import Case, MeasuredProcess, last_words
from benchmarks.generator import packets
from benchmarks.generator.connection import READ, Connection, Loop, Target
from benchmarks.generator.fleet import Fleet
from edgefl.errors import EdgeflError
from edgefl.wire.mqtt.address import Address

_DROPPED = "$SYS/broker/publish/messages/dropped"
_PIPE_BYTES = 1 << 20
_TOLD = (
    b'"event":"started"',
    b'"event":"devicejoined"',
    b'"event":"roundopened"',
    b'"event":"roundended"',
    b'"event":"roundclosed"',
    b'"event":"waiting"',
)
_SETTLE_S = 1.0
_LOOK_S = 0.5
_STALLED_S = 900.0
"""Without a line of the server."""


@dataclass(frozen=True)
class Mark:
    """Where things stand as a round opens, or the last one is closed. ``at``: of the monotonic clock; processor seconds."""

    at: float
    server_s: float
    broker_s: float
    generator_s: float
    acks: int


@dataclass
class FleetFigures:
    """What was seen so far; by round ``seconds``, ``reports`` and ``outcomes``."""

    connect_s: float = 0.0
    server_start_bytes: int = 0
    server_idle_bytes: int = 0
    server_peak_bytes: int = 0
    server_rest_bytes: int = 0
    broker_peak_bytes: int = 0
    dropped_messages: int = 0
    journal_bytes: int = 0
    out_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    reports: list[int] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)


class _Counters:
    """Hears what the broker has dropped."""

    def __init__(self, loop: Loop, target: Target, measured: FleetFigures) -> None:
        self._measured = measured
        hello = packets.connect("edgefl-bench-counters", keepalive_s=0, clean=True)
        self.connection = Connection(loop, target, self, hello)

    def on_up(self) -> None:
        self.connection.subscribe([_DROPPED], qos=0)

    def on_message(self, topic: str, payload: bytes) -> None:
        self._measured.dropped_messages = int(payload)

    def on_down(self, reason: str) -> None:
        pass


class Run:
    """Connects the fleet once the server is up, lets the last device in once all others are, ends after the last round."""

    def __init__(
        self,
        case: Case,
        port: int,
        broker: MeasuredProcess,
        server: MeasuredProcess,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self.case = case
        self.measured = FleetFigures()
        self.marks: list[Mark] = []
        self._loop = Loop()
        self._tell = tell
        self._folder = folder
        self._broker, self._server = broker, server
        self._line = b""
        self._joined: set[str] = set()
        self._over = False
        self._began = 0.0
        self._heard = time.monotonic()
        self._error: EdgeflError | None = None
        self._target = Target(2, ("127.0.0.1", port))
        self._hold = min(1, case.devices - 1)
        self.fleet = Fleet(
            case,
            Address("127.0.0.1", port),
            loop=self._loop,
            say=lambda text: tell(f"{case}: {text}"),
            hold=self._hold,
        )
        self._counters: _Counters | None = None

    def go(self) -> None:
        """EdgeflError if server or broker end, or nothing happens any more."""
        pipe = self._server.process.stdout
        assert pipe is not None
        self._tell(f"{self.case}: the server starts, and exports its tier")
        self._loop.watch(pipe, READ, lambda _: self._read(pipe))
        self._look()
        try:
            self._loop.run()
        finally:
            self.fleet.close()
            self._loop.close()
        if self._error is not None:
            raise self._error

    # -- the server's events ---------------------------------------------------------------------------------

    def _read(self, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), _PIPE_BYTES)
        if not data and self._over:
            self._loop.forget(pipe)
            return
        if not data:
            self._fail(last_words(self._folder / "server-log", "server"))
            return
        self._heard = time.monotonic()
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if any(mark in line[:40] for mark in _TOLD):
                self._told(msgspec.json.decode(line))

    def _told(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                self._loop.later(_SETTLE_S, self._begin)
            case "devicejoined":
                self._joined.add(event["device"])
                if not self.measured.connect_s and len(self._joined) == self.case.devices - self._hold:
                    self.measured.connect_s = time.monotonic() - self._began
                    self._loop.later(_SETTLE_S, self._release)
            case "roundopened":
                self._mark()
                self._tell(f"{self.case}: round {event['round']} of {self.case.rounds + self.case.uncounted}")
            case "roundended":
                self.measured.seconds.append(event["seconds"])
                self.measured.reports.append(event["reports"])
                self.measured.outcomes.append(event["outcome"])
            case "roundclosed" if event["round"] >= self.case.rounds + self.case.uncounted:
                self._finish()

    def _begin(self) -> None:
        self.measured.server_start_bytes = self._server.resident_bytes()
        self._counters = _Counters(self._loop, self._target, self.measured)
        self._began = time.monotonic()
        self._tell(f"{self.case}: connecting")
        self.fleet.begin()

    def _release(self) -> None:
        self.measured.server_idle_bytes = self._server.resident_bytes()
        self._server.forget_peak()
        self._broker.forget_peak()
        self.fleet.release()

    def _finish(self) -> None:
        """The server ends by itself; the broker tells its counters once more."""
        self._over = True
        self._mark()
        self.measured.server_peak_bytes = self._server.peak_bytes()
        self.measured.broker_peak_bytes = self._broker.peak_bytes()
        self._loop.later(_SETTLE_S + _LOOK_S, self._loop.stop)

    def _mark(self) -> None:
        own = os.times()
        self.marks.append(
            Mark(
                time.monotonic(),
                self._server.cpu_s(),
                self._broker.cpu_s(),
                own.user + own.system,
                len(self.fleet.tally.ack_s),
            )
        )

    # -- now and then ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Sizes on the disk, and whether everybody is alive."""
        journal, whole = _sizes(self._folder / "run")
        measured = self.measured
        measured.journal_bytes = max(measured.journal_bytes, journal)
        measured.out_bytes = max(measured.out_bytes, whole)
        if measured.seconds and not self._over:
            resident = self._server.resident_bytes()
            measured.server_rest_bytes = min(measured.server_rest_bytes or resident, resident)
        if self._broker.process.poll() is not None:
            self._fail(last_words(self._folder / "broker" / "log", "broker"))
        if time.monotonic() - self._heard > _STALLED_S:
            self._fail(EdgeflError(f"{self.case}: the server said nothing for {_STALLED_S:g} s"))
        self._loop.later(_LOOK_S, self._look)

    def _fail(self, error: EdgeflError) -> None:
        self._error = self._error or error
        self._loop.stop()


def _sizes(folder: Path) -> tuple[int, int]:
    """Bytes of the journal, and of everything in the folder, bundles left out."""
    journal = whole = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            size = path.stat().st_size if path.is_file() and "bundles" not in path.parts else 0
        except OSError:
            continue
        whole += size
        journal += size if path.name.startswith("journal") else 0
    return journal, whole
