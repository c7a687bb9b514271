"""A generated device: on the wire what :mod:`device_runtime` is, with nothing behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.generator.common import Common, Got
from benchmarks.generator.connection import Connection
from benchmarks.generator.outbox import Fetch, Outbox
from benchmarks.generator.settings import Manner
from benchmarks.generator.updates import Outgoing, Voice, garbage
from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Ack, Progress, Round, Status, Task
from edgefl.wire.mqtt.topics import DeviceTopics

_RUBBISH_BYTES = 1000
_ROUNDS = 2  # without a task, as in edgefl_device.link.listening
_PING_PART = 0.7
"""Of the keep-alive: who sent something just after the last look is silent for nearly two of these."""
_AFTER_S = 1.0
"""How long after its round's deadline a late update comes."""


class Host(Protocol):
    """Who lets devices in."""

    def greeted(self, device: Device) -> None: ...

    def lost(self, device: Device, reason: str, attempt: int) -> None: ...


@dataclass(slots=True, eq=False)
class Device:
    """One connection, one task at a time, one update on its way."""

    _common: Common
    _host: Host
    name: str
    _mine: DeviceTopics = field(init=False)
    _voice: Voice = field(init=False)
    _outbox: Outbox = field(init=False)
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
    _manner: Manner = "honest"
    _fetches: list[Fetch] = field(default_factory=list)
    _fetched: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        common = self._common
        self._mine = common.topics.device(self.name)
        self._voice = Voice(common.load.seed, self.name)
        self._outbox = Outbox(common.loop, common.tally, common.load.limits, self._mine, self._voice)

    # -- the connection --------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Dial; a connection that does not come, or breaks, is tried again."""
        common = self._common
        self._at = self._voice.next()
        offline = self._voice.seal(self._mine.status, Status(online=False))
        hello = common.connect_packet(self.name, Will(self._mine.status, offline))
        connection = self._connection = Connection(common.loop, common.target, self, hello)
        self._keep_alive(connection)

    def on_up(self) -> None:
        connection, common, mine = self._connection, self._common, self._mine
        assert connection is not None
        self._down = -1
        standing = [common.topics.current_round, mine.tasks, mine.acks, mine.profile_requests]
        connection.subscribe(standing, qos=1)
        self._rounds, self._resting = 0, False
        online = self._voice.seal(mine.status, Status(online=True), self._at)
        connection.publish(mine.status, [online], retain=True)
        hello = self._voice.seal(mine.hello, common.hello)
        connection.publish(mine.hello, [hello], retain=True, sent=self._known)
        for fetch in self._fetches:
            fetch.begin(connection)
        self._outbox.up(connection)

    def _known(self) -> None:
        """The broker has the hello."""
        self._greeted = True
        self._host.greeted(self)

    def on_down(self, reason: str) -> None:
        """The connection ended, or never began."""
        self._lose()
        self._down += 1
        self._host.lost(self, reason, self._down)

    def _lose(self) -> None:
        self._outbox.down()
        for fetch in self._fetches:
            fetch.stop()
        if self._greeted:
            self._greeted = False
            self._common.tally.up -= 1

    def _keep_alive(self, connection: Connection) -> None:
        """Also while it is dialled: that a broker has no time to answer is no reason to forget the rest."""
        if connection.open:
            if connection.up:
                connection.ping()
            wait_s = _PING_PART * self._common.load.limits.keepalive_s
            self._common.loop.later(wait_s, lambda: self._keep_alive(connection))

    def leave(self) -> None:
        """In good order: offline, and no will."""
        connection = self._line
        if connection is not None:
            offline = self._voice.seal(self._mine.status, Status(online=False))
            connection.publish(self._mine.status, [offline], retain=True)
            connection.goodbye()

    def close(self) -> None:
        """Without a word."""
        if self._connection is not None:
            self._connection.close()

    @property
    def _line(self) -> Connection | None:
        """The connection, if it stands."""
        return self._connection if self._connection is not None and self._connection.up else None

    # -- what the server says --------------------------------------------------------------------------------

    def on_message(self, topic: str, payload: bytes) -> None:
        tally, mine = self._common.tally, self._mine
        tally.received_messages += 1
        tally.received_bytes += len(payload)
        if not payload:
            return
        try:
            if topic == self._common.topics.current_round:
                self._announced(payload)
            elif topic == mine.acks:
                self._acknowledged(peek(Ack, payload))
            elif topic == mine.tasks:
                self._assigned(peek(Task, payload))
            elif topic.startswith(self._common.blobs):
                for fetch in tuple(self._fetches):
                    fetch.deliver(topic, payload)
        except ProtocolError as error:
            self._common.odd(f"{topic}: {error.message}")

    def _announced(self, payload: bytes) -> None:
        announced = self._common.announcement(payload)
        if announced is self._round:  # a copy
            return
        self._round = announced
        self._outbox.send_again()
        self._begin()
        self._rest(announced)

    def _rest(self, announced: Round) -> None:
        """As a real device does that gets no tasks: listen no more, until there is one."""
        if announced.state == "open" and (self._task is None or self._task.round != announced.round):
            self._rounds += 1
        connection = self._connection
        if self._rounds > _ROUNDS and self._outbox.outgoing is None and connection is not None:
            self._resting = True
            connection.unsubscribe([self._common.topics.current_round])

    def _assigned(self, task: Task) -> None:
        self._rounds = 0
        if self._resting and self._connection is not None and self._connection.up:
            self._resting = False
            self._connection.subscribe([self._common.topics.current_round], qos=1)
        if not task.nonce:  # it asks for nothing but to listen again
            return
        if self._task is None or self._task.nonce != task.nonce:  # it may come any number of times
            self._task = task
        self._outbox.send_again()
        self._begin()

    def _acknowledged(self, ack: Ack) -> None:
        if not ack.nonce:
            self._common.odd(f"the server refuses what {self.name} says ({ack.reason}): {ack.text}")
        elif self._outbox.deliver(ack):
            self._begin()

    # -- a task ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the task up, if its round is announced, and nothing else is at hand."""
        task, announced = self._task, self._round
        if (
            task is None
            or announced is None
            or self._outbox.outgoing is not None
            or self._begun == task.nonce
        ):
            return
        if (task.run, task.round, "open") != (announced.run, announced.round, announced.state):
            return
        self._begun = task.nonce
        common = self._common
        self._manner = common.load.shares.manner(common.load.seed, self.name, task.round)
        if self._manner == "vanish" and self._vanished != task.nonce:
            self._vanish(task)
        else:
            common.tally.tasks += 1
            common.bundle(
                task,
                announced,
                lambda refs, got: self._fetch(refs, got, keep=True),
                lambda: self._take_up(task, announced),
            )

    def _vanish(self, task: Task) -> None:
        """The link breaks; it is there again after a while, and then the task is dealt with if it comes again."""
        self._vanished, self._begun, self._task = task.nonce, "", None
        self._common.tally.vanished += 1
        self._lose()
        self.close()
        self._common.loop.later(self._common.load.away_s, self.connect)

    def _fetch(self, refs: Sequence[BlobRef], done: Got, *, keep: bool) -> None:
        """Fetch this, on this connection and the next ones."""
        common = self._common

        def fetched(found: dict[str, bytes]) -> None:
            self._fetches.remove(fetch)
            done(found)

        fetch = Fetch(common.loop, common.topics, common.load.limits, refs, fetched, keep=keep)
        self._fetches.append(fetch)
        if (line := self._line) is not None:
            fetch.begin(line)

    def _take_up(self, task: Task, announced: Round) -> None:
        """The tier's manifest is known: fetch what a real device fetches for its task, if that is wanted; then train."""
        wanted = self._common.wanted(task, announced) if self._common.load.fetch else []
        refs = [ref for ref in wanted if ref.sha256 not in self._fetched]
        self._fetched = frozenset(ref.sha256 for ref in wanted)
        if refs:
            self._fetch(refs, lambda _: self._train(task, announced), keep=False)
        else:
            self._train(task, announced)

    def _train(self, task: Task, announced: Round) -> None:
        """Let the time pass that training takes, or that makes a late device late. Work on a round that is over is dropped,
        but not the update of a late device, which waits in its outbox."""
        if self._task is not task or self._outbox.outgoing is not None:
            return
        load = self._common.load
        seconds = load.train_s
        if self._manner == "late":
            seconds = load.late_s or max(seconds, announced.deadline - time.time() + _AFTER_S)
            self._make(task, announced)
        if load.progress_s and seconds:
            self._progress(task, time.monotonic(), seconds)
        if seconds:
            self._common.loop.later(seconds, lambda: self._trained(task, announced))
        else:
            self._trained(task, announced)

    def _progress(self, task: Task, began: float, seconds: float) -> None:
        """Tell how far it is, again and again."""
        passed, topic = time.monotonic() - began, self._mine.progress
        if passed >= seconds or self._task is not task:
            return
        if (line := self._line) is not None:
            line.publish(topic, [self._voice.seal(topic, _progress(task, passed, seconds))], qos=0)
        pause_s = 1.0 / self._common.load.progress_s
        self._common.loop.later(pause_s, lambda: self._progress(task, began, seconds))

    def _trained(self, task: Task, announced: Round) -> None:
        """Send the update, unless another task came in the meantime."""
        outgoing = self._outbox.outgoing
        if outgoing is None and self._task is task:
            outgoing = self._make(task, announced)
        if outgoing is None or outgoing.nonce != task.nonce:
            return
        if self._manner == "garbage" and (line := self._line) is not None:
            line.publish(self._mine.update(task.round, 0), [os.urandom(_RUBBISH_BYTES)])
        self._outbox.send()

    def _make(self, task: Task, announced: Round) -> Outgoing:
        """Put the update into the outbox."""
        common = self._common
        outgoing = common.template(task, announced).update(self.name, task, common.load.samples)
        if self._manner == "garbage":
            outgoing = garbage(outgoing, os.urandom(min(_RUBBISH_BYTES, outgoing.size)))
        self._outbox.put(outgoing, self._manner, ask=task.ask is True)
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
