"""Durable outbox: an update is sent repeatedly until the server accepts or refuses it."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from edgefl.errors import ProtocolError, StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.messages import ENVELOPE_BYTES, Ack, UpdateChunk, UpdateFigures, decode
from edgefl.wire.mqtt.topics import DeviceTopics
from edgefl_device.config import DeviceLog
from edgefl_device.link.identity import SignedSession
from edgefl_device.store.database import Outgoing, PastRound, Store

_MOST_ACKS = 64
"""Acknowledgements, and reasons to send again, that wait to be read: an attacker may write a million."""
_LONGEST = 16
"""Longest wait of an update as a multiple of ``ack_timeout_s``; a reason to send it again ends any wait."""


def history_entry(outgoing: Outgoing, ack: Ack) -> PastRound:
    """Return the history entry of an update that ``ack`` accepts or refuses."""
    past = PastRound(
        run=outgoing.run,
        round=outgoing.round,
        tier="",
        nonce=outgoing.nonce,
        outcome=ack.status,
        reason=ack.reason,
        up_bytes=len(outgoing.data),
    )
    with suppress(ProtocolError):  # another release of the runtime may have computed it
        update = decode(UpdateFigures, outgoing.data)
        past = msgspec.structs.replace(
            past,
            tier=update.tier,
            loss=update.metrics.get("loss", float("nan")),
            step_ms=update.profile.step_ms,
            peak_bytes=update.profile.peak_bytes,
            down_bytes=update.profile.down_bytes,
        )
    return past


class Outbox:
    """Thread that sends the updates in the store's outbox, oldest first.

    Args:
        session: Session that publishes chunks, and is woken by a final acknowledgement.
        topics: Topics of this device.
        store: Storage of updates.
        limits: Sizes and timeouts.
        log: Receives each final acknowledgement, and once each failure of the store.
    """

    def __init__(
        self, session: SignedSession, topics: DeviceTopics, store: Store, limits: Limits, log: DeviceLog
    ) -> None:
        self._session = session
        self._topics = topics
        self._store = store
        self._limits = limits
        self._log = log
        self._trouble = ""
        self._sending = ""
        self._acks: queue.SimpleQueue[Ack | None] = queue.SimpleQueue()
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self.sent_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._acks.put(None)
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def wake(self) -> None:
        """Wake the thread, because the store has an update to send."""
        self._work.set()

    def send_again(self) -> None:
        """Send the current update again, because earlier messages may be lost."""
        self._keep(None)
        self._work.set()

    def deliver(self, ack: Ack) -> None:
        """Queue an acknowledgement for the thread; ignore one for another update than the current one.

        Between two updates any acknowledgement is queued. If the queue is full it is dropped; the server repeats it
        with the update.
        """
        if self._sending in ("", ack.nonce):
            self._keep(ack)

    def _keep(self, ack: Ack | None) -> None:
        if self._acks.qsize() < _MOST_ACKS:
            self._acks.put(ack)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                outgoing = self._store.outgoing() if self._session.connected else None
                if outgoing is not None:
                    self._sending = outgoing.nonce
                    self._send_until_settled(outgoing)
                    self._trouble = ""
                    continue
            except StoreError as error:
                # A full disk: the update waits, and is sent again for another acknowledgement.
                if error.message != self._trouble:
                    self._trouble = error.message
                    self._log.event("store", error.message)
                self._stopping.wait(self._limits.retry_pause_s)
                continue
            self._sending = ""
            self._work.wait(timeout=1.0)
            self._work.clear()

    def _send_until_settled(self, outgoing: Outgoing) -> None:
        room = max(self._limits.chunk_bytes // 2, self._limits.chunk_bytes - ENVELOPE_BYTES)
        count = max(1, -(-len(outgoing.data) // room))
        sha256 = hashlib.sha256(outgoing.data).hexdigest()
        every = range(count)
        first = None if outgoing.ask and count > 1 else every
        wanted: Sequence[int] | None = first
        patience_s = self._limits.ack_timeout_s
        while not self._stopping.is_set() and self._session.connected:
            self._drain()
            if wanted is None:
                self._publish(outgoing, sha256, 0, count, b"")
            else:
                self._send(outgoing, sha256, room, wanted)
            ack = self._wait_for(outgoing.nonce, sha256, patience_s)
            if ack is None:
                # A server with a backlog gets no shorter one by hearing everything twice.
                patience_s = min(2 * patience_s, _LONGEST * self._limits.ack_timeout_s)
                wanted = first
            elif ack.status == "missing":
                # Each once: whoever can write acknowledgements could ask for one piece a thousand times.
                wanted = [index for index in dict.fromkeys(ack.missing) if index in every]
            else:
                past = history_entry(outgoing, ack)
                self._store.settle(past)
                text = f"round {past.round}: {ack.status} {ack.text}".rstrip()
                self._log.event(ack.status, text, round=past.round, loss=past.loss)
                self._session.wake()
                return

    def _publish(self, outgoing: Outgoing, sha256: str, index: int, count: int, data: bytes) -> Delivery:
        """Publish one chunk of an update and return its delivery. Empty ``data`` offers the update instead; the server
        then requests chunks.

        Args:
            outgoing: The update.
            sha256: Digest of its bytes.
            index: Number of the chunk.
            count: Number of chunks of the update.
            data: Bytes of the chunk.
        """
        size = len(outgoing.data)
        topic = self._topics.update(outgoing.round, index, outgoing.shard)
        chunk = UpdateChunk(
            nonce=outgoing.nonce, sha256=sha256, index=index, count=count, size=size, data=data
        )
        payload = self._session.seal(topic, chunk)
        self.sent_bytes += len(payload)
        return self._session.publish_payload(topic, payload)

    def _send(self, outgoing: Outgoing, sha256: str, room: int, wanted: Iterable[int]) -> None:
        """Publish chunks of an update, with at most one window of them unconfirmed by the broker. Return early if the
        connection ends.

        Args:
            outgoing: The update.
            sha256: Digest of its bytes.
            room: Bytes of a chunk.
            wanted: Numbers of the chunks to publish.
        """
        count = max(1, -(-len(outgoing.data) // room))
        flying: deque[Delivery] = deque()
        for index in wanted:
            data = bytes(outgoing.data[index * room : (index + 1) * room])
            flying.append(self._publish(outgoing, sha256, index, count, data))
            while len(flying) >= self._limits.upload_window and not self._stopping.is_set():
                if flying[0].wait(1.0):
                    flying.popleft()
                elif not self._session.connected:
                    return

    def _wait_for(self, nonce: str, sha256: str, patience_s: float) -> Ack | None:
        """Return the next acknowledgement of the update with this nonce and digest.

        Return None if none arrives in ``patience_s`` seconds, or if the update is to be sent again.
        """
        try:
            while (ack := self._acks.get(timeout=patience_s)) is not None:
                if (ack.nonce, ack.sha256) == (nonce, sha256):
                    return ack
        except queue.Empty:
            pass
        return None

    def _drain(self) -> None:
        """Remove older requests to send again from the queue, but keep acknowledgements."""
        acks = []
        while not self._acks.empty():
            if (ack := self._acks.get_nowait()) is not None:
                acks.append(ack)
        for ack in acks:
            self._acks.put(ack)
