"""Upload of an update in chunks, with a window of unacknowledged ones, and the download of blobs.

It behaves like :mod:`edgefl_device.link.outbox`, with timers instead of a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.load.connection import Connection, Loop, Timer
from benchmarks.load.settings import Behaviour, LoadCounts
from benchmarks.load.updates import LoadSigner, OutgoingUpdate
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl.wire.mqtt.topics import DeviceTopics, Topics, publish_bytes

_LONGEST = 16
"""Longest wait for an acknowledgement, in units of ``ack_timeout_s``, as on a device."""


@dataclass(slots=True, eq=False)
class UpdateSender:
    """Sender of one update at a time; ``outgoing`` is None without one."""

    _loop: Loop
    _counts: LoadCounts
    _limits: Limits
    _topics: DeviceTopics
    _signer: LoadSigner
    outgoing: OutgoingUpdate | None = None
    _connection: Connection | None = None
    _behaviour: Behaviour = "honest"
    _todo: deque[int] = field(default_factory=deque)
    _flying: int = 0
    _wait_s: float = 0.0
    _sent_at: float = 0.0
    _again: bool = False
    _asks: bool = False
    _offered: bool = False
    _timer: Timer | None = None

    def put(self, outgoing: OutgoingUpdate, behaviour: Behaviour, *, ask: bool) -> None:
        """Store an update until :meth:`send`. ``ask``: the server wants an offer first."""
        self.outgoing, self._behaviour = outgoing, behaviour
        self._asks, self._offered = ask and outgoing.count > 1, False
        self._again, self._sent_at = False, 0.0
        self._wait_s = self._limits.ack_timeout_s
        self._counts.updates += 1
        self._counts.unanswered += 1
        self._counts.update_bytes = max(self._counts.update_bytes, outgoing.size)

    def send(self) -> None:
        """Send the update for the first time; twice if the device duplicates."""
        if self.outgoing is not None:
            self._sent_at = time.monotonic()
            if self._asks:
                self._offer(self.outgoing)
                return
            self._publish(range(self.outgoing.count), times=2 if self._behaviour == "duplicate" else 1)

    def send_again(self) -> None:
        """Send the whole update again, because it may be lost. Does nothing before :meth:`send`."""
        if self.outgoing is None or not self._sent_at or self._connection is None:
            return
        if self._asks:
            self._todo.clear()
            self._offer(self.outgoing)
            return
        self._counts.again += not self._again
        self._again = True
        self._counts.resent_chunks += self.outgoing.count
        self._publish(range(self.outgoing.count))

    def deliver(self, ack: Ack) -> bool:
        """Handle an acknowledgement. Return True if it is the final one of the current update."""
        outgoing = self.outgoing
        if outgoing is None or (ack.nonce, ack.sha256) != (outgoing.nonce, outgoing.sha256):
            return False
        if ack.status == "missing":
            wanted = [index for index in dict.fromkeys(ack.missing) if 0 <= index < outgoing.count]
            if not self._offered:
                self._counts.asked_again += 1
                self._counts.resent_chunks += len(wanted)
            self._offered = False
            self._publish(wanted)
            return False
        self._cancel_timer()
        self._todo.clear()
        self.outgoing = None
        self._counts.settled(self._behaviour, ack.status, ack.reason, time.monotonic() - self._sent_at)
        return True

    def up(self, connection: Connection) -> None:
        """Use a new connection, and send again."""
        self._connection = connection
        self.send_again()

    def down(self) -> None:
        """Stop sending until the next connection."""
        self._connection = None
        self._flying = 0
        self._todo.clear()
        self._cancel_timer()

    def _offer(self, outgoing: OutgoingUpdate) -> None:
        """Offer the update and wait for the server's request."""
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
        connection.publish(topic, [self._signer.seal(topic, offer)])
        self._cancel_timer()
        self._timer = self._loop.later(self._wait_s, self._on_timeout)

    def _publish(self, wanted: Sequence[int], times: int = 1) -> None:
        self._cancel_timer()
        self._todo = deque([*wanted] * times)
        self._pump()

    def _pump(self) -> None:
        """Fill the window with chunks; after the last chunk start the timer of the acknowledgement."""
        outgoing, connection = self.outgoing, self._connection
        if outgoing is None:
            return
        while self._todo and self._flying < self._limits.upload_window:
            if connection is None or not connection.up:
                return
            self._flying += 1
            self._publish_chunk(connection, outgoing, self._todo.popleft())
        if not self._todo and self._timer is None:
            self._timer = self._loop.later(self._wait_s, self._on_timeout)

    def _publish_chunk(self, connection: Connection, outgoing: OutgoingUpdate, index: int) -> None:
        topic = self._topics.update(outgoing.round, index)
        chunk = outgoing.chunk(index)
        payload = self._signer.seal_chunk(topic, chunk.body, chunk.digest)
        self._counts.sent_messages += 1
        self._counts.sent_bytes += publish_bytes(topic, sum(map(len, payload)), 1)
        connection.publish(topic, payload, sent=self._chunk_acknowledged)

    def _chunk_acknowledged(self) -> None:
        self._flying -= 1
        if self._todo:
            self._pump()

    def _on_timeout(self) -> None:
        """Send again with a doubled timeout: repeated updates would lengthen the backlog of a busy server."""
        self._wait_s = min(2 * self._wait_s, _LONGEST * self._limits.ack_timeout_s)
        self.send_again()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_QOS = 0


class BlobFetch:
    """Download of blobs from the broker's retained chunks. Subscribes again to chunks that do not arrive.

    Args:
        refs: blobs to fetch.
        done: receives the bytes by digest; empty ones unless they are to ``keep``.
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
        """Start or continue on a connection that is up."""
        self._line = line
        if self._asked:
            line.subscribe(list(self._asked), _QOS)
        self._ask()

    def deliver(self, topic: str, payload: bytes) -> None:
        """Handle a message on a blob topic."""
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
        """Pause until the next connection."""
        self._line = None
        self._cancel_timer()

    def _ask(self) -> None:
        self._cancel_timer()
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

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
