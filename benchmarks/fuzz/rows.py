"""One target under fuzzed messages: a federation with a round that stays open until the last of them was sent."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from benchmarks.faults.federation import events_of, lab_of, small_federation
from benchmarks.fuzz.corpus import Fuzzer
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

Target = Literal["server", "agent"]

ROUNDS, DEVICES = 4, 3
HEARD_ROUNDS = 2
"""Those whose messages are mutated. Of a later one they would name what only its devices and its server can know."""
WINDOW = 500
_PACE_S = 5.0
_REST_S = 0.03
"""Without a hundredth of a second of processor time in that long, a process is at rest."""
_PATIENCE_S = 120.0
RSS_BOUND = 64 << 20
"""Most bytes of memory by which a target may grow, whatever it is sent."""
DISK_BOUND = 64 << 20
"""Most bytes by which its folder may grow."""


class FuzzRow(msgspec.Struct, frozen=True, kw_only=True):
    """One target. ``answered``: windows of messages after which it came to rest; ``crashes``: how often a process of the
    federation ended. ``accepted``: updates in the sums, ``expected`` those of the honest devices.

    ``honest_round_done``: all rounds ended while or after the messages came; ``same``: with the weights of the run that
    nobody wrote to. ``ok``: all of this as it should be, and growth within :data:`RSS_BOUND` and :data:`DISK_BOUND`.
    """

    target: Target
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


class WatchedLab:
    """The lab's processes, and what they said."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.lab: Lab = lab_of(federation, folder)
        self.events: list[dict[str, Any]] = []
        self.crashes = 0
        self.refused = 0

    def look(self, timeout_s: float = 0.05) -> None:
        """Take what was said, and see who ended. EdgeflError if one cannot go on."""
        self.crashes += len(self.lab.supervisor.check())
        for _, event in self.lab.lines(timeout_s):
            if event.get("event") in ("rejected", "refused"):
                self.refused += 1
            elif event.get("event") in ("roundopened", "roundclosed", "finished"):
                self.events.append(event)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            self.look()
            if time.monotonic() > deadline:
                raise EdgeflError(f"no {what} in {_PATIENCE_S:g} s; see {self.lab.folder / 'logs'}")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def measure(
    target: Target, *, messages: int, seed: int, broker: str, folder: Path, tell: Callable[[str], None]
) -> FuzzRow:
    """Send ``messages`` to one target. EdgeflError if the federation does not even begin."""
    federation = small_federation(
        broker=broker,
        rounds=ROUNDS,
        devices=DEVICES,
        limits={"round_deadline_s": 1e6, "offline_grace_s": 1e6},
    )
    tell("the run that nobody writes to")
    calm = {
        event["round"]: event["weights_sha256"]
        for event in events_of(lab_of(federation, folder / "calm"), 2 * _PATIENCE_S)
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
                f"end of round {HEARD_ROUNDS}", lambda: len(watched.of("roundclosed")) >= HEARD_ROUNDS
            )
            process = lab.supervisor.running(paused)
            if process is not None:
                process.send_signal(signal.SIGSTOP)
            keys = KeyPair(folder / "fuzz.key")
            fuzzer = Fuzzer.of(federation.federation.name, keys, list(heard), HEARD_ROUNDS)
        sending = _Sending(watched, fuzzer, target, name, random.Random(seed), tell)
        with Sender(lab.address) as sender:
            sending.send(sender, min(messages, 10 * WINDOW))
            before = _size(lab, name)
            sending.send(sender, messages - sending.sent)
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
    closed = {event["round"]: event for event in watched.of("roundclosed")}
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


@dataclass
class _Sending:
    """Sends windows of messages, each when the target has read the last; or after a while, if it does not say so."""

    _watched: WatchedLab
    _fuzzer: Fuzzer
    _target: Target
    _name: str
    _rng: random.Random
    _tell: Callable[[str], None]
    _windows: int = 0
    sent: int = 0
    answered: int = 0
    seconds: float = 0.0

    def send(self, sender: Sender, count: int) -> None:
        began = time.monotonic()
        while count > 0:
            window = min(count, WINDOW)
            for _ in range(window):
                topic, payload = (
                    self._fuzzer.to_server(self._rng)
                    if self._target == "server"
                    else self._fuzzer.to_device(self._rng, self._name)
                )
                sender.send(topic, payload)
            self.sent += window
            count -= window
            self._pace()
            if self._windows % 25 == 0:
                self._tell(f"{self._target}: {self.sent} messages")
        self.seconds += time.monotonic() - began

    def _pace(self) -> None:
        """Wait until the target is at rest: it has read all that came. It answers little of what it is sent."""
        self._windows += 1
        process = self._watched.lab.supervisor.running(self._name)
        deadline, before = time.monotonic() + _PACE_S, math.inf
        while process is not None and time.monotonic() < deadline:
            try:
                spent = sum(psutil.Process(process.pid).cpu_times()[:2])
            except psutil.Error:
                return  # it has ended, as the watch finds
            if spent == before:
                self.answered += 1
                return
            before = spent
            self._watched.look(_REST_S)


def _size(lab: Lab, name: str) -> tuple[int, int]:
    """(resident bytes, bytes on disk) of a process and what it writes."""
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


_AHEAD = 64
_WAIT_S = 30.0


class _Recorder:
    """Topic and payload of each message of a session."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    def put(self, event: Event) -> None:
        if isinstance(event, IncomingMessage) and event.payload:
            self.messages.append((event.topic, event.payload))


@contextmanager
def recorded(broker: Address, federation: str) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the list to which each message of a federation, topic and payload, is added while the block runs."""
    recorder = _Recorder()
    session = Session(broker, "edgefl-fuzz-listens", limits=Limits(), clean=True, events=recorder)
    session.subscribe([f"{Topics(federation).root}/#"])
    session.start()
    try:
        yield recorder.messages
    finally:
        session.stop()


class Sender:
    """Publishes with QoS 1, a few messages ahead of the broker: none is lost on the way to it."""

    def __init__(self, broker: Address) -> None:
        self._session = Session(broker, "edgefl-fuzz-sends", limits=Limits(), clean=True)
        self._flying: list[Delivery] = []

    def __enter__(self) -> Sender:
        self._session.start()
        return self

    def send(self, topic: str, payload: bytes) -> None:
        self._flying.append(self._session.publish(topic, payload))
        if len(self._flying) >= _AHEAD:
            if not all(delivery.wait(_WAIT_S) for delivery in self._flying):
                raise BrokerError(f"the broker took no message in {_WAIT_S:g} s; see its log")
            self._flying.clear()

    def __exit__(self, *_: object) -> None:
        self._session.stop()
