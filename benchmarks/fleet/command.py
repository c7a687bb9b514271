"""``python -m benchmarks fleet``: rounds of many connected devices, and what server and broker need for them.

Server events and connections share one event loop of this process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import typer

from benchmarks.fleet.federation import (
    FleetCase,
    MeasuredProcess,
    ended_early,
    running_broker,
    running_server,
)
from benchmarks.load import packets
from benchmarks.load.command import LoadGenerator
from benchmarks.load.connection import READ, BrokerTarget, Connection, Loop, check_room
from benchmarks.load.settings import BehaviourShares, quantile
from benchmarks.options import Json, with_options
from benchmarks.results import bench, mebibytes
from edgefl.errors import EdgeflError
from edgefl.lab.broker import free_port
from edgefl.system.structs import filled
from edgefl.wire.mqtt.address import Address

Share = Annotated[
    float, typer.Option(min=0, max=1, help="share of the tasks, as in `python -m benchmarks load`")
]
_CASES = (
    (1000, 0, "dense"),
    (1000, 0, "onebit"),
    (100, 100, "onebit"),
    (10_000, 100, "onebit"),
    (3000, 0, "middle"),
)
"""Devices, selected, updates."""


@dataclass(frozen=True)
class FleetOptions:
    """Options of the command."""

    devices: Annotated[int, typer.Option(min=0, help="connections; 0: the rows above")] = 0
    selected: Annotated[int, typer.Option(min=0, help="devices of a round; 0: all")] = 0
    update: Annotated[str, typer.Option(help="dense, onebit, middle or small")] = "dense"
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are counted")] = 5
    workers: Annotated[int, typer.Option(min=1, help="processes that take updates in")] = 1
    deadline: Annotated[float, typer.Option(min=1, help="seconds after which a round closes")] = 120.0
    fetch: Annotated[bool, typer.Option("--fetch", help="devices fetch bundle and weights too")] = False
    train: Annotated[float, typer.Option(min=0, help="seconds from a task to its update")] = 0.0
    progress_rate: Annotated[
        float, typer.Option("--progress", min=0, max=5, help="messages a second while they train")
    ] = 0.0
    vanish: Share = 0.0
    late: Share = 0.0
    duplicate: Share = 0.0
    garbage: Share = 0.0
    away: Annotated[float, typer.Option(min=0, help="seconds until one that vanished is back")] = 30.0
    as_json: Json = False

    def cases(self) -> list[FleetCase]:
        """Return the fleets to measure. Raises ConfigError for values that cannot be."""
        sizes = [(self.devices, self.selected, self.update)] if self.devices else _CASES
        return [
            FleetCase(
                devices,
                selected=selected,
                update=update,
                rounds=self.rounds,
                workers=self.workers,
                deadline_s=self.deadline,
                fetch=self.fetch,
                train_s=self.train,
                progress_s=self.progress_rate,
                away_s=self.away,
                shares=BehaviourShares(self.vanish, self.late, self.duplicate, self.garbage),
            )
            for devices, selected, update in sizes
        ]


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes, over the counted rounds (:attr:`FleetCase.uncounted`).

    Resident memory of the server includes its children, without the process that composed the run.

    Attributes:
        connect_s: time from the first connection until the server knows all devices but one.
        round_p50_s, round_p99_s: time from a round's opening to its end, as the server reports them.
        cycle_p50_s: time from one opening to the next.
        updates_per_s: accepted updates over the time of all cycles.
        server_start_bytes: resident memory before the first device.
        server_idle_bytes: resident memory with all devices connected, before the first round.
        server_peak_bytes: highest resident memory since then.
        server_rest_bytes: lowest resident memory since the end of the first round.
        idle_device_bytes: memory of the server for an idle device.
        ack_p50_s, ack_p99_s: time from an update's first chunk to the server's answer.
        resent_share: share of updates that were sent again.
        dropped_messages: messages that the broker dropped.
        journal_bytes, out_bytes: largest sizes of the journal and of the server's whole folder.
        closed: number of ``rounds`` that closed.
        fates: number of answers by behaviour, in all rounds.
        unanswered: updates without an answer at the end of the last round.
    """

    devices: int
    selected: int
    workers: int
    update: str
    update_bytes: int
    rounds: int
    closed: int
    connect_s: float
    round_p50_s: float
    round_p99_s: float
    cycle_p50_s: float
    updates_per_s: float
    server_cpu_s_per_1000: float
    server_cpu_s: float
    broker_cpu_s: float
    generator_cpu_s: float
    generator_cpu_s_per_1000: float
    server_start_bytes: int
    server_idle_bytes: int
    server_peak_bytes: int
    server_rest_bytes: int
    idle_device_bytes: int
    broker_peak_bytes: int
    ack_p50_s: float
    ack_p99_s: float
    resent_share: float
    resent_chunks: int
    dropped_messages: int
    journal_bytes: int
    out_bytes: int
    vanished: int
    unanswered: int
    fates: Mapping[str, int]


@with_options(FleetOptions)
def fleet(options: FleetOptions) -> None:
    """Rounds of many devices that are connected at once: their time, and what server and broker need for them.

    Mosquitto runs with the configuration that edgefl ships, the server is `edgefl server`, and all devices are connections
    of one process that trains nothing (`python -m benchmarks load`): broker, server and generator share this machine.
    Updates are dense (a ResNet-20, 1.1 MB), onebit (the same in one bit an entry), middle (321 KB) or small (3 KB). The
    first round does not count. If only some devices are selected, three more rounds do not count, in which the others
    unsubscribe.

    Without --devices the rows are: 1,000 devices with dense and with onebit updates; 100 of 100 and 100 of 10,000 selected;
    3,000 with 321 KB. That takes some minutes.

    Examples:

      python -m benchmarks fleet --json

      python -m benchmarks fleet --devices 300 --update onebit --rounds 3

      python -m benchmarks fleet --devices 10000 --selected 100 --update onebit --json
    """

    bench("fleet", "rounds of a fleet", options.cases(), measure, _columns, options.as_json)


def _columns(row: FleetRow) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "selected": row.selected,
        "update": row.update,
        "connect s": row.connect_s,
        "round s": row.round_p50_s,
        "cycle s": row.cycle_p50_s,
        "CPU s/1000": row.server_cpu_s_per_1000,
        "MiB": mebibytes(row.server_peak_bytes),
        "ack p99 s": row.ack_p99_s,
        "resent": f"{row.resent_share:.1%}",
        "dropped": row.dropped_messages,
    }


def measure(case: FleetCase, say: Callable[[str], None]) -> FleetRow:
    """Run a broker, a server, and a fleet in this process. Raises EdgeflError if one of them fails."""
    check_room(case.devices)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder, port = Path(name), free_port()
        with running_broker(port, folder / "broker") as broker, running_server(case, port, folder) as server:
            run = FleetRun(case, port, broker, server, folder, say)
            run.go()
            return _row(case, run.measured, run)


def _row(case: FleetCase, measured: FleetFigures, run: FleetRun) -> FleetRow:
    first, last = run.marks[case.uncounted], run.marks[-1]
    accepted = sum(measured.reports[case.uncounted :])
    server_s, broker_s = last.server_s - first.server_s, last.broker_s - first.broker_s
    generator_s = last.generator_s - first.generator_s
    cycles = [end.at - start.at for start, end in pairwise(run.marks[case.uncounted :])]
    rounds = sorted(measured.seconds[case.uncounted :])
    acks = sorted(run.fleet.counts.ack_s[first.acks : last.acks])
    per_thousand = 1000 / max(1, accepted)
    summary = run.fleet.summary()
    return filled(
        FleetRow,
        case,
        measured,
        summary,
        selected=case.tasks,
        closed=sum(outcome == "closed" for outcome in measured.outcomes[case.uncounted :]),
        connect_s=round(measured.connect_s, 3),
        round_p50_s=round(statistics.median(rounds), 4),
        round_p99_s=round(quantile(rounds, 0.99), 4),
        cycle_p50_s=round(statistics.median(cycles), 4),
        updates_per_s=round(accepted / max(1e-9, sum(cycles)), 1),
        server_cpu_s_per_1000=round(server_s * per_thousand, 3),
        server_cpu_s=round(server_s, 3),
        broker_cpu_s=round(broker_s, 3),
        generator_cpu_s=round(generator_s, 3),
        generator_cpu_s_per_1000=round(generator_s * per_thousand, 3),
        idle_device_bytes=max(0, measured.server_idle_bytes - measured.server_start_bytes) // case.devices,
        ack_p50_s=round(quantile(acks, 0.5), 4),
        ack_p99_s=round(quantile(acks, 0.99), 4),
    )


_DROPPED = "$SYS/broker/publish/messages/dropped"
_PIPE_BYTES = 1 << 20
_READ_EVENTS = (
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
"""Longest time without a line of the server."""


@dataclass(frozen=True)
class RoundMark:
    """Monotonic time, processor seconds and number of answers when a round opens, or the last one is closed."""

    at: float
    server_s: float
    broker_s: float
    generator_s: float
    acks: int


@dataclass
class FleetFigures:
    """Figures so far; ``seconds``, ``reports`` and ``outcomes`` by round."""

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


class _BrokerCounters:
    """Subscriber of the broker's counter of dropped messages."""

    def __init__(self, loop: Loop, target: BrokerTarget, measured: FleetFigures) -> None:
        self._measured = measured
        hello = packets.connect("edgefl-bench-counters", keepalive_s=0, clean=True)
        self.connection = Connection(loop, target, self, hello)

    def on_up(self) -> None:
        self.connection.subscribe([_DROPPED], qos=0)

    def on_message(self, topic: str, payload: bytes) -> None:
        self._measured.dropped_messages = int(payload)

    def on_down(self, reason: str) -> None:
        pass


class FleetRun:
    """One measurement: connects all devices but one, then the last one, and ends after the last round."""

    def __init__(
        self,
        case: FleetCase,
        port: int,
        broker: MeasuredProcess,
        server: MeasuredProcess,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.case = case
        self.measured = FleetFigures()
        self.marks: list[RoundMark] = []
        self._loop = Loop()
        self._say = say
        self._folder = folder
        self._broker, self._server = broker, server
        self._line = b""
        self._joined: set[str] = set()
        self._over = False
        self._began = 0.0
        self._last_line_at = time.monotonic()
        self._error: EdgeflError | None = None
        self._target = BrokerTarget(2, ("127.0.0.1", port))
        self._hold = min(1, case.devices - 1)
        self.fleet = LoadGenerator(
            case,
            Address("127.0.0.1", port),
            loop=self._loop,
            say=lambda text: say(f"{case}: {text}"),
            hold=self._hold,
        )
        self._counters: _BrokerCounters | None = None

    def go(self) -> None:
        """Run to the end. Raises EdgeflError if server or broker end, or the server is silent."""
        pipe = self._server.process.stdout
        assert pipe is not None
        self._say(f"{self.case}: the server starts, and exports its tier")
        self._loop.watch(pipe, READ, lambda _: self._read(pipe))
        self._look()
        try:
            self._loop.run()
        finally:
            self.fleet.close()
            self._loop.close()
        if self._error is not None:
            raise self._error

    def _read(self, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), _PIPE_BYTES)
        if not data and self._over:
            self._loop.forget(pipe)
            return
        if not data:
            self._fail(ended_early(self._folder / "server-log", "server"))
            return
        self._last_line_at = time.monotonic()
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if any(mark in line[:40] for mark in _READ_EVENTS):
                self._handle(msgspec.json.decode(line))

    def _handle(self, event: dict[str, Any]) -> None:
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
                self._say(f"{self.case}: round {event['round']} of {self.case.rounds + self.case.uncounted}")
            case "roundended":
                self.measured.seconds.append(event["seconds"])
                self.measured.reports.append(event["reports"])
                self.measured.outcomes.append(event["outcome"])
            case "roundclosed" if event["round"] >= self.case.rounds + self.case.uncounted:
                self._finish()

    def _begin(self) -> None:
        self.measured.server_start_bytes = self._server.resident_bytes()
        self._counters = _BrokerCounters(self._loop, self._target, self.measured)
        self._began = time.monotonic()
        self._say(f"{self.case}: connecting")
        self.fleet.begin()

    def _release(self) -> None:
        self.measured.server_idle_bytes = self._server.resident_bytes()
        self._server.forget_peak()
        self._broker.forget_peak()
        self.fleet.release()

    def _finish(self) -> None:
        """Take the last figures. The server ends by itself; the broker publishes its counters once more."""
        self._over = True
        self._mark()
        self.measured.server_peak_bytes = self._server.peak_bytes()
        self.measured.broker_peak_bytes = self._broker.peak_bytes()
        self._loop.later(_SETTLE_S + _LOOK_S, self._loop.stop)

    def _mark(self) -> None:
        own = os.times()
        self.marks.append(
            RoundMark(
                time.monotonic(),
                self._server.cpu_s(),
                self._broker.cpu_s(),
                own.user + own.system,
                len(self.fleet.counts.ack_s),
            )
        )

    def _look(self) -> None:
        """Sample sizes on the disk, and check that broker and server are alive."""
        journal, whole = _sizes(self._folder / "run")
        measured = self.measured
        measured.journal_bytes = max(measured.journal_bytes, journal)
        measured.out_bytes = max(measured.out_bytes, whole)
        if measured.seconds and not self._over:
            resident = self._server.resident_bytes()
            measured.server_rest_bytes = min(measured.server_rest_bytes or resident, resident)
        if self._broker.process.poll() is not None:
            self._fail(ended_early(self._folder / "broker" / "log", "broker"))
        if time.monotonic() - self._last_line_at > _STALLED_S:
            self._fail(EdgeflError(f"{self.case}: no event of the server for {_STALLED_S:g} s"))
        self._loop.later(_LOOK_S, self._look)

    def _fail(self, error: EdgeflError) -> None:
        self._error = self._error or error
        self._loop.stop()


def _sizes(folder: Path) -> tuple[int, int]:
    """Return the bytes of the journal, and of everything in the folder without bundles."""
    journal = whole = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            size = path.stat().st_size if path.is_file() and "bundles" not in path.parts else 0
        except OSError:
            continue
        whole += size
        journal += size if path.name.startswith("journal") else 0
    return journal, whole
