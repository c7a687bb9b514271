"""Download of blobs: subscribe to missing chunks, a window at a time, verify each one and store it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgefl.errors import BundleError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef, decompress, verify_blob
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import LARGE_CHUNKS, LOST_CHUNK
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.store.database import ChunkRef, Store


@dataclass
class _FetchWindow:
    """State of a download.

    Attributes:
        waiting: Chunks that are not requested yet.
        requested: Requested chunks by topic.
        bad: Number of damaged messages by topic.
        finished: Topics to unsubscribe from.
    """

    waiting: list[ChunkRef]
    requested: dict[str, ChunkRef] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)


_QOS = 0  # a chunk that is lost is requested again
_WINDOWS = 4
"""Windows of chunks that may wait in the queue: some are sent twice."""
_Message = tuple[str, bytes]
_POKE: _Message = ("", b"")
_SILENCE: _Message = ("", b"silence")


class Fetcher:
    """Downloader of blobs into the store, from mirrors or from the broker.

    The thread that reads the session's inbox calls :meth:`deliver`; the round's thread calls the other methods.

    Args:
        session: Session whose subscriptions deliver chunks.
        topics: Topics of the federation, or of one profile request.
        store: Storage of chunks.
        limits: Sizes and timeouts.
        mirrors: Mirrors that are used before the broker; None uses none.
        cancelled: Event that ends a running download with RoundAborted.
    """

    def __init__(
        self,
        session: Session,
        topics: Topics,
        store: Store,
        limits: Limits,
        mirrors: Mirrors | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._session = session
        self._topics = topics
        self._store = store
        self._limits = limits
        self.cancelled = cancelled or threading.Event()
        self.mirrors = mirrors or Mirrors(limits)
        self._arrived: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._received = PublishTraffic()
        self._counting = threading.Lock()
        self._largest = -1
        """Bytes of the largest chunk that is requested; -1: none is."""
        self.fetches = 0
        self.dropped = 0

    @property
    def received_bytes(self) -> int:
        """Bytes of all messages on blob topics since :meth:`take_received`."""
        return self._received.payload

    def take_received(self) -> PublishTraffic:
        """Return and reset the traffic on blob topics, including repeated and refused messages."""
        with self._counting:
            traffic, self._received = self._received, PublishTraffic()
        return traffic

    def deliver(self, topic: str, payload: bytes) -> None:
        """Queue a message from a blob topic. If the queue is full or the message too large, drop and count it."""
        with self._counting:
            self._received += PublishTraffic.of(topic, len(payload), qos=_QOS)
        few = self._arrived.qsize() < _WINDOWS * self._limits.fetch_window
        if few and len(payload) <= self._largest:
            self._arrived.put((topic, payload))
        else:
            self.dropped += 1

    def poke(self) -> None:
        """Wake a running download, which requests all missing chunks again; call it on a new connection and after
        cancelling.
        """
        self._arrived.put(_POKE)

    def get(self, ref: BlobRef) -> bytes:
        """Return the decompressed blob ``ref``, downloaded if it is not in the store.

        Raises:
            BundleError: Chunks do not arrive or are damaged, or the blob decompresses to another size.
            RoundDeclined: The blob is at mirrors only and this device may use none, or chunks exceed its message
                limit.
            RoundAborted: The download was cancelled.
        """
        return next(self.get_all([ref]))

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        """Download the blobs ``refs`` into the store, then return an iterator over their decompressed bytes.

        Raises:
            BundleError: Chunks do not arrive or are damaged, or a blob decompresses to another size.
            RoundDeclined: The blobs are at mirrors only and this device may use none, or chunks exceed its
                message limit.
            RoundAborted: The download was cancelled.
        """
        limit = self._limits.max_blob_bytes
        for ref in refs:
            ref.check(limit)
        self._bring(refs)
        return (decompress(ref, self._whole(ref, refs), limit) for ref in refs)

    def _bring(self, refs: Sequence[BlobRef]) -> None:
        """Download the missing chunks of ``refs`` into the store, from mirrors first.

        Raise the errors of :meth:`get_all`.
        """
        once = list({ref.sha256: ref for ref in refs}.values())
        if not self._store.missing(once):
            self._store.touch(once)
            return
        self._store.make_room(once)
        self.mirrors.bring(once, self._store, self.cancelled)
        if missing := self._store.missing(once):
            self.mirrors.check_broker()
            self._check_chunks([ref for ref, _ in missing])
            self._collect(_FetchWindow(waiting=missing))

    def _check_chunks(self, refs: Sequence[BlobRef]) -> None:
        """Raise RoundDeclined if a chunk of ``refs`` exceeds the message size at which the broker would end the
        connection.
        """
        most = self._limits.readable_bytes
        for ref in refs:
            if (largest := min(ref.chunk, ref.size)) > most:
                raise RoundDeclined(
                    LARGE_CHUNKS,
                    f"expected chunks of {most} bytes at most (limits.max_message_bytes), found {largest} in blob "
                    f"{ref.sha256[:12]}; raise it, or set limits.chunk_bytes of the federation lower",
                    limit=most,
                    largest=largest,
                )

    def _whole(self, ref: BlobRef, beside: Sequence[BlobRef]) -> bytes:
        """Return the stored bytes of ``ref``, verified and still compressed. BundleError if they are damaged on every
        attempt.

        Damaged bytes are downloaded again; the blobs ``beside`` stay in the store meanwhile.
        """
        for _ in range(self._limits.fetch_retries):
            try:
                return verify_blob(ref, self._store.blob(ref))
            except BundleError:
                self._store.drop_blob(ref)
                self._bring([*beside, ref])
        raise BundleError(f"blob {ref.sha256[:12]} is damaged on every attempt; it is refused")

    def _collect(self, window: _FetchWindow) -> None:
        self.fetches += 1
        while not self._arrived.empty():  # an older poke would have the whole window sent twice
            self._arrived.get_nowait()
        self._largest = max(ref.chunk for ref, _ in window.waiting)
        silences, deadline = 0, self._deadline()
        try:
            while window.waiting or window.requested:
                self._request(window)
                arrived = self._next(deadline)
                if self._take(window, arrived):
                    silences, deadline = 0, self._deadline()
                silent, whole = _SILENCE in arrived, all(topic for topic, _ in arrived)
                arrived.clear()  # or they stay in memory while the next ones are awaited
                if whole or not window.requested:
                    continue
                deadline = self._deadline()
                self._session.subscribe(list(window.requested), qos=_QOS, standing=False)
                silences += self._session.connected and silent
                if silences > self._limits.fetch_retries:
                    ref, index = next(iter(window.requested.values()))
                    raise BundleError(
                        f"{LOST_CHUNK}: chunk {index} of blob {ref.sha256[:12]} did not arrive in {silences} attempts of "
                        f"{self._limits.fetch_timeout_s:g} s: is the server up, and does the broker take messages of "
                        f"{self._largest} bytes? With MQTT 3.1.1, Mosquitto drops larger ones than its message_size_limit "
                        "without an error; raise that, or set limits.chunk_bytes of the federation lower",
                        blob=ref.sha256,
                        chunk=index,
                        attempts=silences,
                    )
        finally:
            self._largest = -1
            self._session.unsubscribe([*window.requested, *window.finished])

    def _request(self, window: _FetchWindow) -> None:
        """Subscribe to the next chunks once half of the window is free, and unsubscribe from finished topics."""
        if len(window.requested) > self._limits.fetch_window // 2 or not window.waiting:
            return
        fresh: list[str] = []
        while window.waiting and len(window.requested) < self._limits.fetch_window:
            ref, index = window.waiting.pop(0)
            topic = self._topics.blob_chunk(ref.sha256, index)
            window.requested[topic] = (ref, index)
            fresh.append(topic)
        self._session.unsubscribe(window.finished)
        window.finished.clear()
        self._session.subscribe(fresh, qos=_QOS, standing=False)

    def _take(self, window: _FetchWindow, arrived: Sequence[_Message]) -> bool:
        """Store the requested chunks among ``arrived``, and request damaged ones again. Return False if no requested
        chunk arrived, valid or damaged.
        """
        good: dict[str, tuple[ChunkRef, bytes]] = {}
        bad: dict[str, ChunkRef] = {}
        for topic, payload in arrived:
            if topic not in window.requested or not payload:
                continue
            ref, index = window.requested[topic]
            if ref.accepts(index, payload):
                good[topic] = (ref, index), payload
            else:
                bad[topic] = ref, index
        if good:
            self._store.put_chunks(list(good.values()))
        for topic in good:
            del window.requested[topic]
            window.finished.append(topic)
        for topic, (ref, index) in bad.items():
            if topic not in good:
                self._refuse(window, topic, ref, index)
        return bool(good or bad)

    def _refuse(self, window: _FetchWindow, topic: str, ref: BlobRef, index: int) -> None:
        window.bad[topic] = window.bad.get(topic, 0) + 1
        if window.bad[topic] >= self._limits.fetch_retries:
            raise BundleError(
                f"{LOST_CHUNK}: chunk {index} of blob {ref.sha256[:12]} had a wrong digest {window.bad[topic]} times; "
                "it is refused",
                sha256=ref.sha256,
                index=index,
            )
        self._session.unsubscribe([topic])
        self._session.subscribe([topic], qos=_QOS, standing=False)

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.fetch_timeout_s

    def _next(self, deadline: float) -> list[_Message]:
        """Return up to one window of received messages, or only ``_SILENCE`` at ``deadline``. RoundAborted if
        cancelled.
        """
        arrived: list[_Message] = []
        while not arrived and (left := deadline - time.monotonic()) > 0:
            if not self.cancelled.is_set():
                with suppress(queue.Empty):
                    arrived.append(self._arrived.get(timeout=min(left, 0.25)))
                    for _ in range(self._limits.fetch_window - 1):
                        arrived.append(self._arrived.get_nowait())
            if self.cancelled.is_set():
                raise RoundAborted("the round ended while its blobs were fetched")
        return arrived or [_SILENCE]
