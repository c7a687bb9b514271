"""An update on its way: chunks, a window of them ahead of the broker, until the server has spoken on it.

It does what :mod:`edgefl_device.link.outbox` does, with timers in place of a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.generator.connection import Connection, Loop, Timer
from benchmarks.generator.settings import Manner, Tally
from benchmarks.generator.updates import Outgoing, Voice
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl.wire.mqtt.topics import DeviceTopics, Topics, publish_bytes

_LONGEST = 16
"""Times ``ack_timeout_s`` that an update waits at most, as on a device."""


@dataclass(slots=True, eq=False)
class Outbox:
    """One update at a time; ``outgoing`` is None while there is none."""

    _loop: Loop
    _tally: Tally
    _limits: Limits
    _topics: DeviceTopics
    _voice: Voice
    outgoing: Outgoing | None = None
    _connection: Connection | None = None
    _manner: Manner = "honest"
    _todo: deque[int] = field(default_factory=deque)
    _flying: int = 0
    _patience_s: float = 0.0
    _sent_at: float = 0.0
    _again: bool = False
    _asks: bool = False
    _offered: bool = False
    _timer: Timer | None = None

    def put(self, outgoing: Outgoing, manner: Manner, *, ask: bool) -> None:
        """Keep it until :meth:`send`; ``ask``: it is offered first."""
        self.outgoing, self._manner = outgoing, manner
        self._asks, self._offered = ask and outgoing.count > 1, False
        self._again, self._sent_at = False, 0.0
        self._patience_s = self._limits.ack_timeout_s
        self._tally.updates += 1
        self._tally.unanswered += 1
        self._tally.update_bytes = max(self._tally.update_bytes, outgoing.size)

    def send(self) -> None:
        """All of it for the first time: twice where the device duplicates."""
        if self.outgoing is not None:
            self._sent_at = time.monotonic()
            if self._asks:
                self._offer(self.outgoing)
                return
            self._publish(range(self.outgoing.count), times=2 if self._manner == "duplicate" else 1)

    def send_again(self) -> None:
        """There is a reason to send all of it once more: what was sent may be lost. Nothing before :meth:`send`."""
        if self.outgoing is None or not self._sent_at or self._connection is None:
            return
        if self._asks:
            self._todo.clear()
            self._offer(self.outgoing)
            return
        self._tally.again += not self._again
        self._again = True
        self._tally.resent_chunks += self.outgoing.count
        self._publish(range(self.outgoing.count))

    def deliver(self, ack: Ack) -> bool:
        """The server's word. Whether it was the last one on the update that is being sent."""
        outgoing = self.outgoing
        if outgoing is None or (ack.nonce, ack.sha256) != (outgoing.nonce, outgoing.sha256):
            return False
        if ack.status == "missing":
            wanted = [index for index in dict.fromkeys(ack.missing) if 0 <= index < outgoing.count]
            if not self._offered:
                self._tally.asked_again += 1
                self._tally.resent_chunks += len(wanted)
            self._offered = False
            self._publish(wanted)
            return False
        self._hush()
        self._todo.clear()
        self.outgoing = None
        self._tally.settled(self._manner, ack.status, ack.reason, time.monotonic() - self._sent_at)
        return True

    def up(self, connection: Connection) -> None:
        """There is a connection."""
        self._connection = connection
        self.send_again()

    def down(self) -> None:
        """There is none any more."""
        self._connection = None
        self._flying = 0
        self._todo.clear()
        self._hush()

    def _offer(self, outgoing: Outgoing) -> None:
        """Say that there is an update, and wait to be asked for it."""
        connection = self._connection
        if connection is None or not connection.up:
            return
        topic = self._topics.update(outgoing.round, 0)
        offer = UpdateChunk(
            nonce=outgoing.nonce,
            sha256=outgoing.sha256,
            index=0,
            count=outgoing.count,
            size=outgoing.size,
            data=b"",
        )
        self._offered = True
        connection.publish(topic, [self._voice.seal(topic, offer)])
        self._hush()
        self._timer = self._loop.later(self._patience_s, self._silence)

    def _publish(self, wanted: Sequence[int], times: int = 1) -> None:
        self._hush()
        self._todo = deque([*wanted] * times)
        self._pump()

    def _pump(self) -> None:
        """Publish what the window has room for; then wait for the server's word."""
        outgoing, connection = self.outgoing, self._connection
        if outgoing is None:
            return
        while self._todo and self._flying < self._limits.upload_window:
            if connection is None or not connection.up:
                return
            self._flying += 1
            self._publish_chunk(connection, outgoing, self._todo.popleft())
        if not self._todo and self._timer is None:
            self._timer = self._loop.later(self._patience_s, self._silence)

    def _publish_chunk(self, connection: Connection, outgoing: Outgoing, index: int) -> None:
        topic = self._topics.update(outgoing.round, index)
        chunk = outgoing.chunk(index)
        payload = self._voice.seal_chunk(topic, chunk.body, chunk.digest)
        self._tally.sent_messages += 1
        self._tally.sent_bytes += publish_bytes(topic, sum(map(len, payload)), 1)
        connection.publish(topic, payload, sent=self._landed)

    def _landed(self) -> None:
        """The broker has a chunk."""
        self._flying -= 1
        if self._todo:
            self._pump()

    def _silence(self) -> None:
        """No word came in time: a server with a backlog gets no shorter one by hearing everything twice."""
        self._patience_s = min(2 * self._patience_s, _LONGEST * self._limits.ack_timeout_s)
        self.send_again()

    def _hush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_QOS = 0


class Fetch:
    """Brings ``refs`` by a connection and calls ``done`` with their bytes, or with none where they are not to be kept.

    What does not come is asked for again, for as long as it takes.
    """

    def __init__(
        self,
        loop: Loop,
        topics: Topics,
        limits: Limits,
        refs: Sequence[BlobRef],
        done: Callable[[dict[str, bytes]], None],
        *,
        keep: bool,
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._done = done
        self._keep = keep
        once = {ref.sha256: ref for ref in refs if ref.size}.values()
        self._waiting = [
            (topics.blob_chunk(ref.sha256, index), ref, index) for ref in once for index in range(ref.count)
        ]
        self._waiting.reverse()
        self._asked: dict[str, tuple[BlobRef, int]] = {}
        self._kept: dict[str, dict[int, bytes]] = {ref.sha256: {} for ref in refs}
        self._timer: Timer | None = None
        self._line: Connection | None = None

    def begin(self, line: Connection) -> None:
        """On a connection that is up; again on the next one where it broke."""
        self._line = line
        if self._asked:
            line.subscribe(list(self._asked), _QOS)
        self._ask()

    def deliver(self, topic: str, payload: bytes) -> None:
        """A message on a blob topic."""
        asked = self._asked.get(topic)
        if asked is None or not asked[0].accepts(asked[1], payload):
            return
        del self._asked[topic]
        if self._keep:
            self._kept[asked[0].sha256][asked[1]] = payload
        if self._line is not None:
            self._line.unsubscribe([topic])
        self._ask()

    def stop(self) -> None:
        """The connection is gone."""
        self._line = None
        self._hush()

    def _ask(self) -> None:
        self._hush()
        fresh = []
        while self._waiting and len(self._asked) < self._limits.fetch_window:
            topic, ref, index = self._waiting.pop()
            self._asked[topic] = ref, index
            fresh.append(topic)
        if not self._asked:
            self._done(
                {name: b"".join(parts[each] for each in sorted(parts)) for name, parts in self._kept.items()}
            )
            return
        if fresh and self._line is not None:
            self._line.subscribe(fresh, _QOS)
        self._timer = self._loop.later(self._limits.fetch_timeout_s, self._again)

    def _again(self) -> None:
        if self._line is not None:
            self._line.subscribe(list(self._asked), _QOS)
            self._ask()

    def _hush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
