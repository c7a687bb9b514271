"""Publisher of retained blobs and of the announcement: data that any device may fetch at any time.

The chunks of a blob are published before an announcement that names it, and cleared after one that no longer does. So
a device that follows ``rounds/current`` always finds its chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from edgefl.errors import ConfigError, ProtocolError, StoreError
from edgefl.system.clock import Clock
from edgefl.wire.blobs import BlobRef, Compression, compress, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.envelope import Seal, unsigned, unwrap
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import EventListener, Warned
from edgefl_server.publish.blob_store import BlobStore, MemoryBlobStore

_MOST_ECHOES = 64
_MOST_WAITING = 64 << 20
"""Largest number of bytes of unacknowledged chunks, which are copied in memory."""
_BROKER_S = 10.0
"""Seconds to wait for the broker to acknowledge a chunk. After that, chunks are queued in memory without a limit."""


class MessagePublisher(Protocol):
    """Broker session, as far as the publisher uses it (:class:`edgefl.wire.mqtt.session.Session`)."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Delivery:
        """Queue a message and return its delivery, which reports the broker's acknowledgement."""


class Publisher:
    """Publisher of the live blobs (those that devices may fetch) and of the announcement, as retained messages.

    Nothing is sent before :meth:`connected`. Blobs that are offered while the broker is away are sent after the next
    connection.

    Args:
        session: Broker session that sends the messages.
        topics: Topics of the federation.
        chunk_bytes: Default size of a chunk.
        compression: Compression of blobs that are not ``plain``.
        blob_limit: Largest blob in bytes; devices refuse larger ones.
        seal: Function that signs a message for a topic.
        store: Storage of the blobs' bytes; None to keep them in memory.
        by_broker: False if devices fetch blobs from mirrors only, so that no chunk is sent to the broker.
        most_bytes: Largest announcement in bytes. A larger one is divided: its pages are blobs.
    """

    def __init__(
        self,
        session: MessagePublisher,
        topics: Topics,
        chunk_bytes: int,
        compression: Compression = "none",
        blob_limit: int = Limits().max_blob_bytes,
        seal: Seal = unsigned,
        *,
        store: BlobStore | None = None,
        by_broker: bool = True,
        most_bytes: int = Limits().announcement_bytes,
    ) -> None:
        self._session = session
        self._topics = topics
        self._chunk = chunk_bytes
        self._compression: Compression = compression
        self._limit = blob_limit
        self._seal = seal
        self._payload = b""
        self._announced: Round | None = None
        self._echoes: deque[bytes] = deque(maxlen=_MOST_ECHOES)
        self._store: BlobStore = store or MemoryBlobStore()
        self._by_broker = by_broker
        self._most_bytes = most_bytes
        self._blobs: dict[str, BlobRef] = {}
        self._page: BlobRef | None = None
        self._waiting: deque[tuple[Delivery, int]] = deque()
        self._waiting_bytes = 0
        self._stale: dict[str, BlobRef] = {}
        self._delivery: Delivery | None = None
        self._cleared: Delivery | None = None
        self._restored: Delivery | None = None
        self.message_limit = 0
        """Largest message in bytes that the broker is known to accept; 0 if unknown."""
        self._sent: set[str] = set()
        self.current: Round | None = None
        self.online = False
        self.asking = False
        """True after a connection, until :meth:`check_retained` has compared what the broker retains."""

    @property
    def live(self) -> Mapping[str, BlobRef]:
        """References of the blobs that devices may fetch, by SHA-256."""
        return dict(self._blobs)

    @property
    def pages(self) -> tuple[BlobRef, ...]:
        """Blob with the rest of the last announcement, if that exceeded the size limit of a message; else empty.

        The blob stays live as long as that announcement.
        """
        return () if self._page is None else (self._page,)

    def offer(self, data: bytes, chunk: int = 0, *, plain: bool = False) -> BlobRef:
        """Add a blob to the live set and publish it, unless an equal one is live already.

        Args:
            data: Bytes of the blob.
            chunk: Bytes of a chunk; 0 for the default.
            plain: True to send it uncompressed, so that the reference has the digest of ``data``. Otherwise it is
                compressed if that makes it smaller.

        Returns:
            Reference of the blob as it is sent.

        Raises:
            ConfigError: If the blob is larger than the limit.
            StoreError: If the blob cannot be stored.
        """
        if len(data) > self._limit:
            raise ConfigError(
                f"a blob of {len(data)} bytes is to be published, and limits.max_blob_bytes is {self._limit}: devices would "
                "refuse it; raise the limit on both sides, or cut the model into smaller units",
                size=len(data),
                limit=self._limit,
            )
        return self.put(*compress(data, chunk or self._chunk, "none" if plain else self._compression))

    def put(self, ref: BlobRef, data: bytes) -> BlobRef:
        """Publish a blob that is encoded already, unless an equal one is live, and return its reference.

        Raises:
            StoreError: If the blob cannot be stored.
        """
        if ref.sha256 not in self._blobs:
            self._store.keep(ref.sha256, data)
            self._blobs[ref.sha256] = ref
            self._stale.pop(ref.sha256, None)
            if self.online:
                self._send(ref.sha256)
        return self._blobs[ref.sha256]

    def encoded(self, sha256: str) -> bytes:
        """Return the encoded bytes of a live blob.

        Raises:
            StoreError: If its file was removed.
        """
        return self._store.read(sha256)

    def announce(self, message: Round) -> None:
        """Publish ``message`` as the retained announcement ``rounds/current``. Its blobs must be offered before.

        If it is too large for one message, a part of it is published as a blob (:attr:`pages`). While the broker is
        away, it is published after the next connection.

        Raises:
            ConfigError: If the announcement is larger than the broker accepts (:attr:`message_limit`) even when
                divided.
            StoreError: If the blob with its second part cannot be stored.
        """
        topic = self._topics.current_round
        payload, page = self._seal(topic, message), b""
        if len(payload) > min(self._most_bytes, self.message_limit or self._most_bytes):
            page = message.page
            payload = self._seal(topic, message.paged(describe(page, self._chunk)))
        if self.message_limit and len(payload) > self.message_limit:
            raise ConfigError(
                f"the announcement of a round takes {len(payload)} bytes, and the broker {self.message_limit} a "
                "message (`[broker] profile`): use fewer units or tiers, or another broker",
                size=len(payload),
                limit=self.message_limit,
                key="broker.profile",
            )
        self._page = self.offer(page, plain=True) if page else None
        self.current, self._delivery = message, None
        if self.online:
            self._payload, self._announced = payload, message
            self._echoes.append(payload)
            self._delivery = self._session.publish(topic, payload, retain=True)

    def wait_delivered(self, timeout_s: float) -> bool:
        """Return True if the broker acknowledged the last announcement and the cleared topics, False on timeout.

        Waits at most ``timeout_s`` for each of both. False also if nothing was announced on this connection.
        """
        announced = self._delivery is not None and self._delivery.wait(timeout_s)
        return announced and (self._cleared is None or self._cleared.wait(timeout_s))

    def keep_only(self, wanted: Iterable[str]) -> None:
        """Clear every live blob at the broker and in the storage, except those ``wanted`` (SHA-256) and the
        :attr:`pages`.

        Call it after the announcement that no longer names them.

        Raises:
            StoreError: If the storage cannot delete them.
        """
        keep = {*wanted, *(ref.sha256 for ref in self.pages)}
        for sha256 in [name for name in self._blobs if name not in keep]:
            ref = self._blobs.pop(sha256)
            if self._by_broker:
                self.clear(ref)
        self._store.keep_only(self._blobs.keys())

    def clear(self, ref: BlobRef) -> None:
        """Clear the chunks of a blob at the broker, which may be of an earlier process. A live blob is not cleared.

        While the broker is away, the blob is cleared after the next connection.
        """
        if ref.sha256 in self._blobs:
            return
        if not self.online:
            self._stale[ref.sha256] = ref
            return
        self._sent.discard(ref.sha256)
        for index in range(ref.count):
            self._cleared = self._session.publish(
                self._topics.blob_chunk(ref.sha256, index), b"", retain=True
            )

    def connected(self, *, resumed: bool = False) -> None:
        """Publish what the broker lacks after a connection.

        If the broker resumed the session, the publisher waits for the retained announcement (:meth:`check_retained`),
        so that the whole model is sent only if the broker lost something. Otherwise everything is published.
        """
        if resumed and self._payload:
            self.asking = True
        else:
            self._publish(lost=True)

    def check_retained(self, retained: bytes) -> None:
        """Compare the announcement retained by the broker with the last one sent, and publish everything if they differ.

        ``retained`` is empty if the broker has none. If they are equal, the broker also has the blobs, which are sent
        before the announcement. A killed broker may have kept the session but lost messages.
        """
        if self.asking:
            self._publish(lost=retained != self._payload)

    def disconnected(self) -> None:
        """Note that the broker is away. Offers are published after the next connection."""
        self.online = self.asking = False
        self._echoes.clear()

    def _publish(self, *, lost: bool) -> None:
        """Publish the live blobs and the announcement after a connection, and clear the blobs that are due.

        ``lost`` is True if the broker lost earlier messages, so that everything is sent again. Otherwise only messages
        that were never sent are sent.
        """
        self.online, self.asking = True, False
        for sha256 in self._blobs:
            if lost or sha256 not in self._sent:
                self._send(sha256)
        if self.current is not None and (lost or self.current != self._announced):
            self.announce(self.current)
        stale, self._stale = self._stale, {}
        for ref in stale.values():
            self.clear(ref)

    def is_foreign(self, payload: bytes) -> bool:
        """Return True if another client published ``payload`` on the announcement's topic; an empty payload cleared it.

        The broker returns each own announcement once, in order. A payload that matches the next of these is not
        foreign.
        """
        if payload not in self._echoes:
            return bool(self._payload) and (bool(self._echoes) or payload != self._payload)
        while self._echoes.popleft() != payload:
            pass
        return False

    def restore(self) -> None:
        """Publish the announcement again with a new message number, after another client replaced or cleared it."""
        if self.current is not None:
            self.announce(self.current)

    def restore_blobs(self) -> None:
        """Publish all live blobs again because a device misses some.

        Does nothing while an earlier repetition is not delivered yet, or while the broker is away.
        """
        if self.online and (self._restored is None or self._restored.done()):
            for sha256 in self._blobs:
                self._restored = self._send(sha256) or self._restored

    def storage_fault(self) -> str:
        """Return a description of the first live blob whose bytes cannot be read from the storage; an empty text if
        all can.

        Reads only the first chunk of each.
        """
        try:
            for ref in self._blobs.values():
                for _ in self._store.pieces(ref):
                    break
        except StoreError as error:
            return error.message
        return ""

    def close(self) -> None:
        """Close the storage of the blobs. The publisher must not be used afterwards."""
        self._store.close()

    def _send(self, sha256: str) -> Delivery | None:
        """Send the chunks of a live blob to the broker, and return the delivery of the last one.

        None if devices use mirrors only, or if the blob cannot be read.
        """
        ref, last, patient = self._blobs[sha256], None, True
        self._sent.add(sha256)
        if not self._by_broker:
            return None
        with suppress(StoreError):  # a device that misses it reports that, and the server warns the user
            for index, piece in enumerate(self._store.pieces(ref)):
                patient = patient and self._room_for(len(piece))
                last = self._session.publish(self._topics.blob_chunk(sha256, index), piece, retain=True)
                self._waiting.append((last, len(piece)))
                self._waiting_bytes += len(piece)
        return last

    def _room_for(self, nbytes: int) -> bool:
        """Wait until few enough bytes are unacknowledged at the broker to send ``nbytes`` more, and return True.

        Return False if the broker acknowledges nothing for ten seconds.
        """
        while self._waiting and self._waiting_bytes + nbytes > _MOST_WAITING:
            oldest, size = self._waiting.popleft()
            self._waiting_bytes -= size
            if not oldest.wait(_BROKER_S):
                self._waiting.clear()
                self._waiting_bytes = 0
                return False
        return True


_HEARD_S = 2.0
"""Seconds to wait for the retained announcement before everything is published again."""
_ANNOUNCE_S = 1.0
_BLOBS_S = 30.0
"""Shortest time between two repetitions of all blobs, because a model is large."""


class AnnouncementMonitor:
    """Monitor of the announcement at the broker. It restores the announcement and blobs that other clients removed.

    :meth:`receive` handles messages on the announcement's topic, and :meth:`restore_missing` a device's failed
    attempt. :meth:`step` must be called periodically.

    Args:
        publisher: Publisher of the announcement.
        own_key: Public key of this server.
        listener: Receives warnings.
        clock: Epoch seconds.
    """

    def __init__(
        self, publisher: Publisher, own_key: bytes, listener: EventListener, clock: Clock = time.time
    ) -> None:
        self._publisher = publisher
        self._own_key = own_key
        self._listener = listener
        self._clock = clock
        self._announced = self._sent = self._heard_by = 0.0
        self._due = False
        self._has_warned = False
        self._fault = ""

    def connected(self, *, resumed: bool) -> None:
        """Publish what the broker lacks after a connection (:meth:`Publisher.connected`).

        ``resumed``: the broker kept the session, so first wait up to two seconds for the retained announcement.
        """
        self._publisher.connected(resumed=resumed)
        self._heard_by = self._clock() + _HEARD_S

    def disconnected(self) -> None:
        """Note that the broker is away."""
        self._publisher.disconnected()

    def receive(self, payload: bytes, *, retained: bool = False) -> None:
        """Handle a message on the announcement's topic. ``retained``: the broker sent it because of a subscription.

        If another client sent it, restore the announcement, and emit one warning for the first time.
        """
        if self._publisher.asking:
            if retained:  # else it was on its way when the connection ended
                self._publisher.check_retained(payload)
            return
        if not self._publisher.is_foreign(payload):
            return
        # An announcement of an earlier process of ours is not reported.
        if not self._has_warned and not self._is_ours(payload):
            self._has_warned = True
            text = "somebody else cleared or replaced the announcement at the broker; it is published again each time"
            self._listener.emit(Warned(tier="", text=text))
        self._due = True
        self.step()

    def _is_ours(self, payload: bytes) -> bool:
        with suppress(ProtocolError):
            envelope = unwrap(payload)
            return envelope is not None and envelope.key == self._own_key
        return False

    def restore_missing(self) -> None:
        """Publish the blobs again after a device failed because of missing chunks; at most every 30 seconds.

        If stored blobs cannot be read, emit a warning.
        """
        if self._publisher.online and self._clock() - self._sent >= _BLOBS_S:
            self._sent = self._clock()
            self._publisher.restore_blobs()
            if (fault := self._publisher.storage_fault()) != self._fault:
                self._fault = fault
                if fault:
                    self._listener.emit(Warned(tier="", text=fault))

    def step(self) -> float | None:
        """Restore the announcement at the broker if that is due.

        Return the seconds until the next call; None if no call is needed before another event.
        """
        if self._publisher.asking:
            if (left := self._heard_by - self._clock()) > 0:
                return left
            self._publisher.check_retained(b"")
        if not self._due or not self._publisher.online:
            return None
        wait = self._announced + _ANNOUNCE_S - self._clock()
        if 0 < wait <= _ANNOUNCE_S:
            return wait
        self._due, self._announced = False, self._clock()
        self._publisher.restore()
        return None
