"""A generated device: on the wire what :mod:`device_runtime` is, with nothing behind it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgefl.lab.generator.connection import Connection
from edgefl.lab.generator.fetching import Fetch
from edgefl.lab.generator.loop import Timer
from edgefl.lab.generator.settings import Manner
from edgefl.lab.generator.updates import Outgoing, garbage, indices
from edgefl.lab.generator.voice import Voice
from edgefl.wire.blobs import BlobRef
from edgefl.wire.errors import ProtocolError
from edgefl.wire.mqtt.client_ids import client_id
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Ack, Hello, Progress, Round, Status, Task
from edgefl.wire.mqtt.packets import publish_bytes

if TYPE_CHECKING:
    from edgefl.lab.generator.fleet import Fleet

_LONGEST = 16  # as in device_runtime.link.outbox
_RUBBISH_BYTES = 1000
_PING_PART = 0.7
"""Of the keep-alive: who sent something just after the last look is silent for nearly two of these."""
_AFTER_S = 1.0
"""How long after its round's deadline a late update comes."""


class Device:
    """One connection, one task at a time, one update on its way."""

    __slots__ = (
        "_again",
        "_at",
        "_begun",
        "_connection",
        "_down",
        "_fetched",
        "_fetches",
        "_fleet",
        "_flying",
        "_greeted",
        "_manner",
        "_mine",
        "_outgoing",
        "_patience_s",
        "_round",
        "_sent_at",
        "_task",
        "_timer",
        "_todo",
        "_vanished",
        "_voice",
        "name",
    )

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self._fleet = fleet
        self._mine = fleet.topics.device(name)
        self._voice = Voice(fleet.load.seed, name)
        self._connection: Connection | None = None
        self._greeted = False
        self._down = -1  # attempts to connect since the last connection
        self._at = 0
        self._round: Round | None = None
        self._task: Task | None = None
        self._begun = ""
        self._fetches: list[Fetch] = []
        self._fetched: frozenset[str] = frozenset()
        self._manner: Manner = "honest"
        self._outgoing: Outgoing | None = None
        self._todo: deque[int] = deque()
        self._flying = 0
        self._patience_s = 0.0
        self._sent_at = 0.0
        self._again = False
        self._vanished = ""
        self._timer: Timer | None = None

    # -- the connection --------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Dial; a connection that does not come, or breaks, is tried again."""
        fleet, limits = self._fleet, self._fleet.load.limits
        self._at = self._voice.next()
        offline = self._voice.seal(self._mine.status, Status(online=False))
        hello = fleet.hello_packet(
            client_id("device", fleet.load.federation, self.name), Will(self._mine.status, offline)
        )
        connection = self._connection = Connection(fleet.loop, fleet.target, self, hello)
        fleet.loop.later(_PING_PART * limits.keepalive_s, lambda: self._keep_alive(connection))

    def on_up(self) -> None:
        connection, fleet = self._connection, self._fleet
        assert connection is not None
        self._down = -1
        mine = self._mine
        connection.subscribe(
            [fleet.topics.current_round, mine.tasks, mine.acks, mine.profile_requests], qos=1
        )
        online = self._voice.seal(mine.status, Status(online=True), self._at)
        connection.publish(mine.status, [online], retain=True)
        connection.publish(
            mine.hello, [self._voice.seal(mine.hello, fleet.hello)], retain=True, sent=self._known
        )
        for fetch in self._fetches:
            fetch.begin(connection)
        if self._outgoing is not None:
            self._flying = 0
            self._send_again()

    def _known(self) -> None:
        """The broker has the hello."""
        if not self._greeted:
            self._greeted = True
            self._fleet.greeted(self)

    def on_down(self, reason: str) -> None:
        """The connection ended, or never began."""
        self._lose()
        self._down += 1
        self._fleet.lost(self, reason, self._down)

    def _lose(self) -> None:
        self._flying = 0
        self._todo.clear()
        self._rest()
        for fetch in self._fetches:
            fetch.stop()
        if self._greeted:
            self._greeted = False
            self._fleet.tally.up -= 1

    def _keep_alive(self, connection: Connection) -> None:
        """Also while it is dialled: that a broker has no time to answer is no reason to forget the rest."""
        if connection.open:
            if connection.up:
                connection.ping()
            wait_s = _PING_PART * self._fleet.load.limits.keepalive_s
            self._fleet.loop.later(wait_s, lambda: self._keep_alive(connection))

    def leave(self) -> None:
        """In good order: offline, and no will."""
        connection = self._connection
        self._rest()
        if connection is not None and connection.up:
            offline = self._voice.seal(self._mine.status, Status(online=False))
            connection.publish(self._mine.status, [offline], retain=True)
            connection.goodbye()

    def close(self) -> None:
        """Without a word."""
        self._rest()
        if self._connection is not None:
            self._connection.close()

    # -- what the server says --------------------------------------------------------------------------------

    def on_message(self, topic: str, payload: bytes) -> None:
        tally = self._fleet.tally
        tally.received_messages += 1
        tally.received_bytes += len(payload)
        if not payload:
            return
        mine = self._mine
        try:
            if topic == self._fleet.topics.current_round:
                self._announced(payload)
            elif topic == mine.acks:
                self._acknowledged(peek(Ack, payload))
            elif topic == mine.tasks:
                self._assigned(peek(Task, payload))
            elif topic.startswith(self._fleet.blobs):
                for fetch in tuple(self._fetches):
                    fetch.deliver(topic, payload)
        except ProtocolError as error:
            self._fleet.odd(f"{topic}: {error.message}")

    def _announced(self, payload: bytes) -> None:
        announced = self._fleet.announcement(payload)
        if announced is None or announced is self._round:  # a copy
            return
        self._round = announced
        self._remind()
        self._begin()

    def _assigned(self, task: Task) -> None:
        self._task = task
        self._remind()
        self._begin()

    def _remind(self) -> None:
        """The server speaks of a round: it may have lost what was sent."""
        if self._outgoing is not None:
            self._send_again()

    def _acknowledged(self, ack: Ack) -> None:
        outgoing = self._outgoing
        if not ack.nonce:
            self._fleet.odd(f"{self.name}: {ack.reason}: {ack.text}")
        if outgoing is None or (ack.nonce, ack.sha256) != (outgoing.nonce, outgoing.sha256):
            return
        if ack.status == "missing":
            self._fleet.tally.asked_again += 1
            wanted = indices(outgoing, ack.missing)
            self._fleet.tally.resent_chunks += len(wanted)
            self._send(wanted)
            return
        self._rest()
        self._todo.clear()
        self._outgoing = None
        seconds = time.monotonic() - self._sent_at
        self._fleet.tally.settled(self._manner, ack.status, ack.reason, seconds)
        self._begin()

    # -- a task ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the task up, if its round is announced, and nothing else is at hand."""
        task, announced = self._task, self._round
        if task is None or announced is None or self._outgoing is not None or self._begun == task.nonce:
            return
        if (task.run, task.round, "open") != (announced.run, announced.round, announced.state):
            return
        self._begun = task.nonce
        fleet = self._fleet
        self._manner = fleet.load.shares.manner(fleet.load.seed, self.name, task.nonce)
        if self._manner == "vanish" and self._vanished != task.nonce:
            self._vanish(task)
        else:
            fleet.tally.tasks += 1
            fleet.bundle(self, task, announced)

    def _vanish(self, task: Task) -> None:
        """The link breaks; it is there again after a while, and then the task is dealt with if it comes again."""
        self._vanished, self._begun, self._task = task.nonce, "", None
        self._fleet.tally.vanished += 1
        self._lose()
        if self._connection is not None:
            self._connection.close()
        self._fleet.loop.later(self._fleet.load.away_s, self.connect)

    def fetch(self, refs: Sequence[BlobRef], done: Callable[[dict[str, bytes]], None], *, keep: bool) -> None:
        """Fetch this, on this connection and the next ones."""
        fleet = self._fleet

        def fetched(found: dict[str, bytes]) -> None:
            self._fetches.remove(fetch)
            done(found)

        fetch = Fetch(fleet.loop, fleet.topics, fleet.load.limits, refs, fetched, keep=keep)
        self._fetches.append(fetch)
        if self._connection is not None and self._connection.up:
            fetch.begin(self._connection)

    def take_up(self, task: Task, announced: Round) -> None:
        """The tier's manifest is known: fetch what a real device fetches for its task, if that is wanted; then train."""
        wanted = self._fleet.wanted(task, announced) if self._fleet.load.fetch else []
        refs = [ref for ref in wanted if ref.sha256 not in self._fetched]
        self._fetched = frozenset(ref.sha256 for ref in wanted)
        if refs:
            self.fetch(refs, lambda _: self._train(task, announced), keep=False)
        else:
            self._train(task, announced)

    def _train(self, task: Task, announced: Round) -> None:
        """Let the time pass that training takes, or that makes a late device late. Work on a round that is over is dropped,
        but not the update of a late device, which waits in its outbox."""
        if self._task is not task or self._outgoing is not None:
            return
        load, late = self._fleet.load, self._manner == "late"
        seconds = load.train_s
        if late:
            seconds = load.late_s or max(seconds, announced.deadline - time.time() + _AFTER_S)
            self._make(task, announced)
        if load.progress_s and seconds:
            self._progress(task, time.monotonic(), seconds)
        if seconds:
            self._fleet.loop.later(seconds, lambda: self._trained(task, announced))
        else:
            self._trained(task, announced)

    def _progress(self, task: Task, began: float, seconds: float) -> None:
        """Tell how far it is, again and again."""
        passed, fleet = time.monotonic() - began, self._fleet
        if passed >= seconds or self._task is not task:
            return
        if self._connection is not None and self._connection.up:
            told = Progress(
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
            self._connection.publish(
                self._mine.progress, [self._voice.seal(self._mine.progress, told)], qos=0
            )
        fleet.loop.later(1.0 / fleet.load.progress_s, lambda: self._progress(task, began, seconds))

    def _trained(self, task: Task, announced: Round) -> None:
        """Send the update, unless another task came in the meantime."""
        outgoing = self._outgoing
        if outgoing is None and self._task is task:
            outgoing = self._make(task, announced)
        if outgoing is None or outgoing.nonce != task.nonce:
            return
        if self._manner == "garbage":
            self._garble(task)
        self._sent_at = time.monotonic()
        wanted = indices(outgoing, None)
        self._send([*wanted, *wanted] if self._manner == "duplicate" else wanted)

    def _make(self, task: Task, announced: Round) -> Outgoing:
        """Put the update into the outbox."""
        fleet = self._fleet
        outgoing = fleet.template(task, announced).update(self.name, task, fleet.load.samples)
        if self._manner == "garbage":
            outgoing = garbage(outgoing, os.urandom(min(_RUBBISH_BYTES, outgoing.size)))
        self._outgoing = outgoing
        self._again, self._sent_at = False, 0.0
        self._patience_s = fleet.load.limits.ack_timeout_s
        fleet.tally.updates += 1
        fleet.tally.unanswered += 1
        fleet.tally.update_bytes = max(fleet.tally.update_bytes, outgoing.size)
        return outgoing

    def _garble(self, task: Task) -> None:
        """Something on the topic of a chunk that is no message."""
        if self._connection is not None and self._connection.up:
            self._connection.publish(self._mine.update(task.round, 0), [os.urandom(_RUBBISH_BYTES)])

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, wanted: list[int]) -> None:
        self._rest()
        self._todo = deque(wanted)
        self._pump()

    def _send_again(self) -> None:
        """The whole update once more."""
        tally = self._fleet.tally
        if self._outgoing is None or not self._sent_at or self._connection is None or not self._connection.up:
            return
        tally.again += not self._again
        self._again = True
        wanted = indices(self._outgoing, None)
        tally.resent_chunks += len(wanted)
        self._send(wanted)

    def _silence(self) -> None:
        """No word came in time."""
        limits = self._fleet.load.limits
        self._patience_s = min(2 * self._patience_s, _LONGEST * limits.ack_timeout_s)
        self._send_again()

    def _pump(self) -> None:
        """Publish chunks, a window of them ahead of the broker; then wait for the server's word."""
        outgoing, connection, limits = self._outgoing, self._connection, self._fleet.load.limits
        if outgoing is None or connection is None or not connection.up:
            return
        tally = self._fleet.tally
        while self._todo and self._flying < limits.upload_window and connection.up:
            index = self._todo.popleft()
            topic = self._mine.update(outgoing.round, index)
            chunk = outgoing.chunk(index)
            payload = self._voice.seal_chunk(topic, chunk.body, chunk.digest)
            tally.sent_messages += 1
            tally.sent_bytes += publish_bytes(topic, sum(map(len, payload)), 1)
            self._flying += 1
            connection.publish(topic, payload, sent=self._landed)
        if not self._todo and self._timer is None and connection.up:
            self._timer = self._fleet.loop.later(self._patience_s, self._silence)

    def _landed(self) -> None:
        """The broker has a chunk."""
        self._flying -= 1
        if self._todo:
            self._pump()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def greeting(tier: str, memory_bytes: int, samples: int) -> Hello:
    """What all generated devices say of themselves."""
    return Hello(
        agent="edgefl load", memory_bytes=memory_bytes, cores=1, samples=samples, engines={}, tier=tier
    )
