"""``python -m benchmarks fuzz``: invalid messages to a running server or agent while an honest federation trains."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import psutil
import typer

from benchmarks.federations import events_of, lab_of, small_federation
from benchmarks.fuzz_messages import Fuzzer
from benchmarks.options import BrokerKind, Json
from benchmarks.results import bench
from edgefl.config import Federation
from edgefl.errors import BrokerError, EdgeflError
from edgefl.lab.lab import Lab
from edgefl.wire.keys import KeyPair
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.events import Event, IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics

Target = StrEnum("Target", ["server", "agent"])
HEARD_ROUNDS = 2
"""Rounds whose messages are mutated. Messages of the open round hold nonces that a stranger cannot know."""
ROUNDS, DEVICES = 4, 3
WINDOW = 500
_PACE_S = 5.0
_REST_S = 0.03
"""A process that takes no hundredth of a second of processor time in this long is idle."""
_TIMEOUT_S = 120.0
RSS_BOUND = 64 << 20
"""Most bytes of memory by which a target may grow."""
DISK_BOUND = 64 << 20
"""Most bytes by which its folder may grow."""
_AHEAD = 64
_WAIT_S = 30.0


class FuzzRow(msgspec.Struct, frozen=True, kw_only=True):
    """One target.

    Attributes:
        answered: windows of messages after which the target became idle.
        crashes: ended processes of the federation.
        accepted: updates in the sums; ``expected``: updates of the honest devices.
        honest_round_done: True if all rounds closed.
        same: True if they have the weights of the undisturbed run.
        ok: True if all of this is correct and growth is within :data:`RSS_BOUND` and :data:`DISK_BOUND`.
    """

    target: str
    broker: str
    seed: int
    messages: int
    seconds: float
    answered: int
    crashes: int
    rss_growth: int
    disk_growth: int
    accepted: int
    expected: int
    refused: int
    honest_round_done: bool
    same: bool
    ok: bool
    why: str


def fuzz(
    messages: Annotated[int, typer.Option(min=1, help="how many, to each target")] = 20_000,
    target: Annotated[
        list[Target] | None, typer.Option(help="server or agent, may be repeated; default: both")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="decides the messages")] = 1,
    broker: BrokerKind = "auto",
    as_json: Json = False,
) -> None:
    """Send invalid messages to a running server and a running agent while an honest federation trains.

    They are genuine messages of that federation with bits, bytes, fields and topics changed. The last round stays open until
    all were sent. A row has the target, the ended processes and the growth of memory and folder in bytes. It also has
    whether the honest rounds ended with the weights of an undisturbed run. The exit code is 1 if a check of a row fails.

    Examples:

      python -m benchmarks fuzz --messages 20000 --json

      python -m benchmarks fuzz --messages 1000000 --target server --json
    """

    with TemporaryDirectory(prefix="edgefl-fuzz-") as folder:
        rows = bench(
            "fuzz",
            "under fuzzed messages",
            target or Target,
            lambda each, say: measure(
                each.value,
                messages=messages,
                seed=seed,
                broker=broker,
                folder=Path(folder) / each.value,
                say=say,
            ),
            _fuzz_columns,
            as_json,
            _fuzz_line,
        )
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def _fuzz_line(row: FuzzRow) -> str:
    return f"{row.target}: {row.messages:,} messages in {row.seconds:g} s: {row.why or 'all checks hold'}"


def _fuzz_columns(row: FuzzRow) -> dict[str, Any]:
    return {
        "target": row.target,
        "messages": f"{row.messages:,}",
        "s": row.seconds,
        "crashes": row.crashes,
        "MiB": f"{row.rss_growth / 2**20:.1f}",
        "MiB on disk": f"{row.disk_growth / 2**20:.1f}",
        "accepted": f"{row.accepted} of {row.expected}",
        "same": row.same,
    }


class WatchedLab:
    """Lab with a record of its events and of ended processes."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.lab: Lab = lab_of(federation, folder)
        self.events: list[dict[str, Any]] = []
        self.crashes = 0
        self.refused = 0

    def look(self, timeout_s: float = 0.05) -> None:
        """Read events, and count ended processes. Raises EdgeflError if one cannot be restarted."""
        self.crashes += len(self.lab.supervisor.check())
        for _, event in self.lab.lines(timeout_s):
            if event.get("event") in ("rejected", "refused"):
                self.refused += 1
            elif event.get("event") in ("roundopened", "roundclosed", "finished"):
                self.events.append(event)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true. Raises EdgeflError on timeout."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            self.look()
            if time.monotonic() > deadline:
                raise EdgeflError(f"no {what} in {_TIMEOUT_S:g} s; see {self.lab.folder / 'logs'}")

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def measure(
    target: str, *, messages: int, seed: int, broker: str, folder: Path, say: Callable[[str], None]
) -> FuzzRow:
    """Send ``messages`` to one target. Raises EdgeflError if the undisturbed run fails."""
    federation = small_federation(
        broker=broker,
        rounds=ROUNDS,
        devices=DEVICES,
        limits={"round_deadline_s": 1e6, "offline_grace_s": 1e6},
    )
    say("the undisturbed run")
    calm = {
        event["round"]: event["weights_sha256"]
        for event in events_of(lab_of(federation, folder / "calm"), 2 * _TIMEOUT_S)
        if event.get("event") == "roundclosed"
    }
    watched = WatchedLab(federation, folder / target)
    lab = watched.lab
    name = "server" if target == "server" else lab.devices[0]
    paused, why, sent = lab.devices[-1], "", (0, 0, 0.0)
    growth = (0, 0)
    try:
        lab.start()
        with recorded(lab.address, federation.federation.name) as heard:
            watched.wait(
                f"end of round {HEARD_ROUNDS}", lambda: len(watched.events_of("roundclosed")) >= HEARD_ROUNDS
            )
            process = lab.supervisor.running(paused)
            if process is not None:
                process.send_signal(signal.SIGSTOP)
            if not any("/devices/" in topic for topic, _ in heard):
                raise EdgeflError("the recorder connected after the first rounds; run the benchmark again")
            keys = KeyPair(folder / "fuzz.key")
            fuzzer = Fuzzer.of(federation.federation.name, keys, list(heard), HEARD_ROUNDS)
        with _MessageAttack(watched, fuzzer, target, name, random.Random(seed)) as sending:
            sending.send(min(messages, 10 * WINDOW), say)
            before = _size(lab, name)
            sending.send(messages - sending.sent, say)
            after = _size(lab, name)
        growth = after[0] - before[0], after[1] - before[1]
        sent = sending.sent, sending.answered, sending.seconds
        if process is not None:
            process.send_signal(signal.SIGCONT)
        watched.wait("end of the honest rounds", lambda: lab.supervisor.is_done("server"))
    except EdgeflError as error:
        why = error.message
    finally:
        lab.stop()
    closed = {event["round"]: event for event in watched.events_of("roundclosed")}
    accepted = sum(event["reports"] for event in closed.values())
    same = {number: event["weights_sha256"] for number, event in closed.items()} == calm
    checks = {
        "a process ended": watched.crashes == 0,
        "an update too many or too few is in the sums": accepted == ROUNDS * DEVICES,
        "the weights are others": same,
        f"memory grew by {growth[0]} bytes": growth[0] <= RSS_BOUND,
        f"the folder grew by {growth[1]} bytes": growth[1] <= DISK_BOUND,
    }
    why = why or "; ".join(text for text, fine in checks.items() if not fine)
    return FuzzRow(
        target=target,
        broker=federation.broker.kind,
        seed=seed,
        messages=sent[0],
        seconds=round(sent[2], 2),
        answered=sent[1],
        crashes=watched.crashes,
        rss_growth=growth[0],
        disk_growth=growth[1],
        accepted=accepted,
        expected=ROUNDS * DEVICES,
        refused=watched.refused,
        honest_round_done=len(closed) == ROUNDS,
        same=same,
        ok=not why,
        why=why,
    )


class _MessageAttack:
    """Sender of windows of fuzzed messages: the next one when the target has read the last, or after a timeout.

    It publishes with QoS 1, a few messages ahead of the broker, so that the broker loses none.
    """

    def __init__(
        self, watched: WatchedLab, fuzzer: Fuzzer, target: str, name: str, rng: random.Random
    ) -> None:
        self.sent = 0
        self.answered = 0
        self.seconds = 0.0
        self._watched = watched
        self._fuzzer = fuzzer
        self._target, self._name = target, name
        self._rng = rng
        self._windows = 0
        self._session = Session(watched.lab.address, "edgefl-fuzz-sends", limits=Limits(), clean=True)
        self._flying: list[Delivery] = []

    def __enter__(self) -> _MessageAttack:
        self._session.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._session.stop()

    def send(self, count: int, say: Callable[[str], None]) -> None:
        """Send ``count`` messages. Raises BrokerError if the broker accepts none for a while."""
        began = time.monotonic()
        while count > 0:
            window = min(count, WINDOW)
            for _ in range(window):
                topic, payload = (
                    self._fuzzer.to_server(self._rng)
                    if self._target == "server"
                    else self._fuzzer.to_device(self._rng, self._name)
                )
                self._publish(topic, payload)
            self.sent += window
            count -= window
            self._pace()
            if self._windows % 25 == 0:
                say(f"{self._target}: {self.sent} messages")
        self.seconds += time.monotonic() - began

    def _publish(self, topic: str, payload: bytes) -> None:
        self._flying.append(self._session.publish(topic, payload))
        if len(self._flying) >= _AHEAD:
            if not all(delivery.wait(_WAIT_S) for delivery in self._flying):
                raise BrokerError(f"the broker accepted no message in {_WAIT_S:g} s; see its log")
            self._flying.clear()

    def _pace(self) -> None:
        """Wait until the target is idle, which means that it has read all messages. It answers few of them."""
        self._windows += 1
        process = self._watched.lab.supervisor.running(self._name)
        deadline, before = time.monotonic() + _PACE_S, math.inf
        while process is not None and time.monotonic() < deadline:
            try:
                spent = sum(psutil.Process(process.pid).cpu_times()[:2])
            except psutil.Error:
                return  # it has ended; WatchedLab.look counts that
            if spent == before:
                self.answered += 1
                return
            before = spent
            self._watched.look(_REST_S)


def _size(lab: Lab, name: str) -> tuple[int, int]:
    """Return the resident bytes of a process, and the bytes of its files."""
    process = lab.supervisor.running(name)
    if process is None:
        return 0, 0
    folder = lab.folder if name == "server" else lab.folder / "devices" / name
    others = ("devices", "broker", "logs") if name == "server" else ()
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in others
    ]
    return psutil.Process(process.pid).memory_info().rss, sum(path.stat().st_size for path in files)


class _MessageRecorder:
    """Queue of a session's events that keeps topic and payload of each message."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    def put(self, event: Event) -> None:
        """Take an event of the session."""
        if isinstance(event, IncomingMessage) and event.payload:
            self.messages.append((event.topic, event.payload))


@contextmanager
def recorded(broker: Address, federation: str) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the list to which each message of a federation, topic and payload, is added while the block runs."""
    recorder = _MessageRecorder()
    session = Session(broker, "edgefl-fuzz-listens", limits=Limits(), clean=True, events=recorder)
    session.subscribe([f"{Topics(federation).root}/#"])
    session.start()
    try:
        yield recorder.messages
    finally:
        session.stop()
