"""A generated device: it speaks the protocol like :mod:`edgefl_device`, and trains nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.load.connection import Connection
from benchmarks.load.sender import BlobFetch, UpdateSender
from benchmarks.load.settings import Behaviour
from benchmarks.load.state import FleetState, Got
from benchmarks.load.updates import LoadSigner, OutgoingUpdate, garbage
from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Ack, Progress, Round, Status, Task
from edgefl.wire.mqtt.topics import DeviceTopics

_RUBBISH_BYTES = 1000
_ROUNDS = 2  # without a task, as in edgefl_device.link.presence
_PING_PART = 0.7
"""Share of the keep-alive between two checks: a message right after one delays the ping by nearly two of these."""
_AFTER_S = 1.0
"""Delay of a late update after its round's deadline."""


class Host(Protocol):
    """Owner of the devices, which connects them."""

    def on_hello_sent(self, device: GeneratedDevice) -> None: ...

    def on_connection_lost(self, device: GeneratedDevice, reason: str, attempt: int) -> None: ...


@dataclass(slots=True, eq=False)
class GeneratedDevice:
    """One connection, with at most one task and one update at a time."""

    _state: FleetState
    _host: Host
    name: str
    _mine: DeviceTopics = field(init=False)
    _signer: LoadSigner = field(init=False)
    _sender: UpdateSender = field(init=False)
    _connection: Connection | None = None
    _greeted: bool = False
    _down: int = -1
    """Attempts to connect since the last connection."""
    _at: int = 0
    _round: Round | None = None
    _rounds: int = 0
    _resting: bool = False
    _task: Task | None = None
    _begun: str = ""
    _vanished: str = ""
    _behaviour: Behaviour = "honest"
    _fetches: list[BlobFetch] = field(default_factory=list)
    _fetched: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        state = self._state
        self._mine = state.topics.device(self.name)
        self._signer = LoadSigner(state.load.seed, self.name)
        self._sender = UpdateSender(state.loop, state.counts, state.load.limits, self._mine, self._signer)

    def connect(self) -> None:
        """Connect. The host schedules the next attempt if the connection fails or breaks."""
        state = self._state
        self._at = self._signer.next()
        offline = self._signer.seal(self._mine.status, Status(online=False))
        hello = state.connect_packet(self.name, Will(self._mine.status, offline))
        connection = self._connection = Connection(state.loop, state.target, self, hello)
        self._keep_alive(connection)

    def on_up(self) -> None:
        connection, state, mine = self._connection, self._state, self._mine
        assert connection is not None
        self._down = -1
        standing = [state.topics.current_round, mine.tasks, mine.acks, mine.profile_requests]
        connection.subscribe(standing, qos=1)
        self._rounds, self._resting = 0, False
        online = self._signer.seal(mine.status, Status(online=True), self._at)
        connection.publish(mine.status, [online], retain=True)
        hello = self._signer.seal(mine.hello, state.hello)
        connection.publish(mine.hello, [hello], retain=True, sent=self._hello_sent)
        for fetch in self._fetches:
            fetch.begin(connection)
        self._sender.up(connection)

    def _hello_sent(self) -> None:
        self._greeted = True
        self._host.on_hello_sent(self)

    def on_down(self, reason: str) -> None:
        """Handle the end of a connection, or a failed attempt."""
        self._lose()
        self._down += 1
        self._host.on_connection_lost(self, reason, self._down)

    def _lose(self) -> None:
        self._sender.down()
        for fetch in self._fetches:
            fetch.stop()
        if self._greeted:
            self._greeted = False
            self._state.counts.up -= 1

    def _keep_alive(self, connection: Connection) -> None:
        """Schedule pings. Checks also run during the dialling, because a busy broker answers late."""
        if connection.open:
            if connection.up:
                connection.ping()
            wait_s = _PING_PART * self._state.load.limits.keepalive_s
            self._state.loop.later(wait_s, lambda: self._keep_alive(connection))

    def leave(self) -> None:
        """Publish the offline status and disconnect, so that the broker does not publish the will."""
        connection = self._line
        if connection is not None:
            offline = self._signer.seal(self._mine.status, Status(online=False))
            connection.publish(self._mine.status, [offline], retain=True)
            connection.goodbye()

    def close(self) -> None:
        """Close the connection without DISCONNECT."""
        if self._connection is not None:
            self._connection.close()

    @property
    def _line(self) -> Connection | None:
        """Connection, or None while it is down."""
        return self._connection if self._connection is not None and self._connection.up else None

    def on_message(self, topic: str, payload: bytes) -> None:
        counts, mine = self._state.counts, self._mine
        counts.received_messages += 1
        counts.received_bytes += len(payload)
        if not payload:
            return
        try:
            if topic == self._state.topics.current_round:
                self._announced(payload)
            elif topic == mine.acks:
                self._acknowledged(peek(Ack, payload))
            elif topic == mine.tasks:
                self._assigned(peek(Task, payload))
            elif topic.startswith(self._state.blobs):
                for fetch in tuple(self._fetches):
                    fetch.deliver(topic, payload)
        except ProtocolError as error:
            self._state.warn(f"{topic}: {error.message}")

    def _announced(self, payload: bytes) -> None:
        announced = self._state.announcement(payload)
        if announced is self._round:  # a copy
            return
        self._round = announced
        self._sender.send_again()
        self._begin()
        self._rest(announced)

    def _rest(self, announced: Round) -> None:
        """Unsubscribe from announcements after some rounds without a task, like a real device."""
        if announced.state == "open" and (self._task is None or self._task.round != announced.round):
            self._rounds += 1
        connection = self._connection
        if self._rounds > _ROUNDS and self._sender.outgoing is None and connection is not None:
            self._resting = True
            connection.unsubscribe([self._state.topics.current_round])

    def _assigned(self, task: Task) -> None:
        self._rounds = 0
        if self._resting and self._connection is not None and self._connection.up:
            self._resting = False
            self._connection.subscribe([self._state.topics.current_round], qos=1)
        if not task.nonce:  # it only wakes a device that has unsubscribed
            return
        if self._task is None or self._task.nonce != task.nonce:  # it may arrive several times
            self._task = task
        self._sender.send_again()
        self._begin()

    def _acknowledged(self, ack: Ack) -> None:
        if not ack.nonce:
            self._state.warn(f"the server rejects messages of {self.name} ({ack.reason}): {ack.text}")
        elif self._sender.deliver(ack):
            self._begin()

    def _begin(self) -> None:
        """Start the task if its round is announced and no update is pending."""
        task, announced = self._task, self._round
        if (
            task is None
            or announced is None
            or self._sender.outgoing is not None
            or self._begun == task.nonce
        ):
            return
        if (task.run, task.round, "open") != (announced.run, announced.round, announced.state):
            return
        self._begun = task.nonce
        state = self._state
        self._behaviour = state.load.shares.behaviour(state.load.seed, self.name, task.round)
        if self._behaviour == "vanish" and self._vanished != task.nonce:
            self._vanish(task)
        else:
            state.counts.tasks += 1
            state.bundle(
                task,
                announced,
                lambda refs, got: self._fetch(refs, got, keep=True),
                lambda: self._start_task(task, announced),
            )

    def _vanish(self, task: Task) -> None:
        """Break the connection, and connect again after a while. The task runs if it arrives again."""
        self._vanished, self._begun, self._task = task.nonce, "", None
        self._state.counts.vanished += 1
        self._lose()
        self.close()
        self._state.loop.later(self._state.load.away_s, self.connect)

    def _fetch(self, refs: Sequence[BlobRef], done: Got, *, keep: bool) -> None:
        """Fetch blobs over this connection and the next ones."""
        state = self._state

        def fetched(found: dict[str, bytes]) -> None:
            self._fetches.remove(fetch)
            done(found)

        fetch = BlobFetch(state.loop, state.topics, state.load.limits, refs, fetched, keep=keep)
        self._fetches.append(fetch)
        if (line := self._line) is not None:
            fetch.begin(line)

    def _start_task(self, task: Task, announced: Round) -> None:
        """Fetch the task's blobs like a real device, if the load asks for it; then train."""
        wanted = self._state.wanted(task, announced) if self._state.load.fetch else []
        refs = [ref for ref in wanted if ref.sha256 not in self._fetched]
        self._fetched = frozenset(ref.sha256 for ref in wanted)
        if refs:
            self._fetch(refs, lambda _: self._train(task, announced), keep=False)
        else:
            self._train(task, announced)

    def _train(self, task: Task, announced: Round) -> None:
        """Wait for the time of training, or until a late update is late. Drops work on a closed round.

        The update of a late device is made now, because its round is closed when it is sent.
        """
        if self._task is not task or self._sender.outgoing is not None:
            return
        load = self._state.load
        seconds = load.train_s
        if self._behaviour == "late":
            seconds = load.late_s or max(seconds, announced.deadline - time.time() + _AFTER_S)
            self._make(task, announced)
        if load.progress_s and seconds:
            self._progress(task, time.monotonic(), seconds)
        if seconds:
            self._state.loop.later(seconds, lambda: self._trained(task, announced))
        else:
            self._trained(task, announced)

    def _progress(self, task: Task, began: float, seconds: float) -> None:
        """Publish the progress periodically."""
        passed, topic = time.monotonic() - began, self._mine.progress
        if passed >= seconds or self._task is not task:
            return
        if (line := self._line) is not None:
            line.publish(topic, [self._signer.seal(topic, _progress(task, passed, seconds))], qos=0)
        pause_s = 1.0 / self._state.load.progress_s
        self._state.loop.later(pause_s, lambda: self._progress(task, began, seconds))

    def _trained(self, task: Task, announced: Round) -> None:
        """Send the update, unless another task has arrived."""
        outgoing = self._sender.outgoing
        if outgoing is None and self._task is task:
            outgoing = self._make(task, announced)
        if outgoing is None or outgoing.nonce != task.nonce:
            return
        if self._behaviour == "garbage" and (line := self._line) is not None:
            line.publish(self._mine.update(task.round, 0), [os.urandom(_RUBBISH_BYTES)])
        self._sender.send()

    def _make(self, task: Task, announced: Round) -> OutgoingUpdate:
        """Create the update and hand it to the sender."""
        state = self._state
        outgoing = state.template(task, announced).update(self.name, task, state.load.samples)
        if self._behaviour == "garbage":
            outgoing = garbage(outgoing, os.urandom(min(_RUBBISH_BYTES, outgoing.size)))
        self._sender.put(outgoing, self._behaviour, ask=task.ask is True)
        return outgoing


def _progress(task: Task, passed: float, seconds: float) -> Progress:
    return Progress(
        round=task.round,
        tier=task.tier,
        stage="train",
        step=int(100 * passed / seconds),
        steps=100,
        loss=1.0,
        step_ms=10.0 * seconds,
        peak_bytes=0,
        down_bytes=0,
        up_bytes=0,
    )
