"""Fetching blobs: subscribe to the chunks that are missing, a window at a time, check each, keep it on disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from edgefl.errors import BundleError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef, decompress, verified
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import LARGE_CHUNKS, LOST_CHUNK
from edgefl.wire.mqtt.topics import PublishTraffic, Topics
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.store.database import Place, Store


class Subscriber(Protocol):
    """The part of a broker session that fetching needs."""

    @property
    def connected(self) -> bool: ...

    def subscribe(self, topics: Sequence[str], qos: int = 1, *, standing: bool = True) -> None: ...

    def unsubscribe(self, topics: Sequence[str]) -> None: ...


@dataclass
class _Window:
    """Chunks still to ask for, chunks asked for, and bad answers per chunk."""

    waiting: list[Place]
    asked: dict[str, Place] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)


_QOS = 0  # a chunk that is lost is asked for again
_WINDOWS = 4
"""Windows of chunks that may wait to be looked at: some are sent twice."""
_Message = tuple[str, bytes]
_POKE: _Message = ("", b"")
_SILENCE: _Message = ("", b"silence")


class Fetcher:
    """Brings blobs from the broker into the store, where ``mirrors`` have not. ``deliver`` is called by whoever reads the
    session's inbox."""

    def __init__(
        self,
        session: Subscriber,
        topics: Topics,
        store: Store,
        limits: Limits,
        aborted: Callable[[], bool],
        mirrors: Mirrors | None = None,
    ) -> None:
        self._session = session
        self._topics = topics
        self._store = store
        self._limits = limits
        self._aborted = aborted
        self.mirrors = mirrors or Mirrors(limits)
        self._arrived: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._received = PublishTraffic()
        self._counting = threading.Lock()
        self._largest = -1
        """Bytes of the largest chunk that is asked for; -1: none is."""
        self.fetches = 0
        self.dropped = 0

    @property
    def received_bytes(self) -> int:
        """Payloads of all messages on blob topics since they were last taken."""
        return self._received.payload

    def take_received(self) -> PublishTraffic:
        """What came on blob topics since this was last asked: second copies and what was refused count too."""
        with self._counting:
            traffic, self._received = self._received, PublishTraffic()
        return traffic

    def deliver(self, topic: str, payload: bytes) -> None:
        """A message on a blob topic arrived."""
        with self._counting:
            self._received += PublishTraffic.of(topic, len(payload), qos=_QOS)
        few = self._arrived.qsize() < _WINDOWS * self._limits.fetch_window
        if few and len(payload) <= self._largest:
            self._arrived.put((topic, payload))
        else:  # more than was asked for
            self.dropped += 1

    def poke(self) -> None:
        """The connection came back: what was asked for must be asked for again. A round that is over ends its waiting."""
        self._arrived.put(_POKE)

    def get(self, ref: BlobRef) -> bytes:
        """The blob ``ref``, from the store, a mirror or the broker, unfolded if it travelled compressed."""
        return next(self.get_all([ref]))

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        """The blobs ``refs``, whole and checked: all are in the store before this returns, and are read one by one.

        BundleError if nobody gives the right bytes, or if they do not unfold to what they should. RoundDeclined where they
        are at mirrors only, and the device may use none, or if chunks are larger than what the device reads.
        """
        limit = self._limits.max_blob_bytes
        for ref in refs:
            ref.check(limit)
        self._bring(refs)
        return (decompress(ref, self._whole(ref, refs), limit) for ref in refs)

    def _bring(self, refs: Sequence[BlobRef]) -> None:
        """Have all chunks of ``refs`` in the store."""
        once = list({ref.sha256: ref for ref in refs}.values())
        if not self._store.missing(once):
            self._store.touch(once)
            return
        self._store.make_room(once)
        self.mirrors.bring(once, self._store, self._aborted)
        if missing := self._store.missing(once):
            self.mirrors.check_broker()
            self._check_chunks([ref for ref, _ in missing])
            self._collect(_Window(waiting=missing))

    def _check_chunks(self, refs: Sequence[BlobRef]) -> None:
        """RoundDeclined if a message of the broker with a chunk of ``refs`` would end the connection."""
        most = self._limits.readable_bytes
        for ref in refs:
            if (largest := min(ref.chunk, ref.size)) > most:
                raise RoundDeclined(
                    LARGE_CHUNKS,
                    f"expected chunks of {most} bytes at most (limits.max_message_bytes), found {largest} in blob "
                    f"{ref.sha256[:12]}; raise it, or set limits.chunk_bytes of the federation lower",
                )

    def _whole(self, ref: BlobRef, beside: Sequence[BlobRef]) -> bytes:
        """The blob as it travels. If it has to be fetched again, those ``beside`` it stay."""
        for _ in range(self._limits.fetch_retries):
            try:
                return verified(ref, self._store.blob(ref))
            except BundleError:
                self._store.drop_blob(ref)
                self._bring([*beside, ref])
        raise BundleError(f"blob {ref.sha256[:12]} is damaged on every attempt; it is refused")

    def _collect(self, window: _Window) -> None:
        self.fetches += 1
        self._forget_the_past()
        self._largest = max(ref.chunk for ref, _ in window.waiting)
        silences, deadline = 0, self._patience()
        try:
            while window.waiting or window.asked:
                self._ask(window)
                arrived = self._next(deadline)
                if self._take(window, arrived):
                    silences, deadline = 0, self._patience()
                silent, whole = _SILENCE in arrived, all(topic for topic, _ in arrived)
                arrived.clear()  # not to be held while the next are waited for
                if whole or not window.asked:
                    continue
                deadline = self._patience()
                self._session.subscribe(list(window.asked), qos=_QOS, standing=False)
                silences += self._session.connected and silent
                if silences > self._limits.fetch_retries:
                    ref, index = next(iter(window.asked.values()))
                    raise BundleError(
                        f"{LOST_CHUNK}: chunk {index} of blob {ref.sha256[:12]} did not arrive in {silences} attempts of "
                        f"{self._limits.fetch_timeout_s:g} s: is the server up, and does the broker take messages of "
                        f"{self._largest} bytes? With MQTT 3.1.1, Mosquitto drops larger ones than its message_size_limit "
                        "without an error; raise that, or set limits.chunk_bytes of the federation lower"
                    )
        finally:
            self._largest = -1
            self._session.unsubscribe([*window.asked, *window.finished])

    def _forget_the_past(self) -> None:
        """A poke from before the first chunk is asked for would have the whole window sent twice."""
        while not self._arrived.empty():
            self._arrived.get_nowait()

    def _ask(self, window: _Window) -> None:
        """Fill the window once half of it is free; leave the topics that are done."""
        if len(window.asked) > self._limits.fetch_window // 2 or not window.waiting:
            return
        fresh: list[str] = []
        while window.waiting and len(window.asked) < self._limits.fetch_window:
            ref, index = window.waiting.pop(0)
            topic = self._topics.blob_chunk(ref.sha256, index)
            window.asked[topic] = (ref, index)
            fresh.append(topic)
        self._session.unsubscribe(window.finished)
        window.finished.clear()
        self._session.subscribe(fresh, qos=_QOS, standing=False)

    def _take(self, window: _Window, arrived: Sequence[_Message]) -> bool:
        """Whether any of the messages answers what was asked for, well or badly; anything else is as good as silence."""
        good: dict[str, tuple[Place, bytes]] = {}
        bad: dict[str, Place] = {}
        for topic, payload in arrived:
            if topic not in window.asked or not payload:
                continue
            ref, index = window.asked[topic]
            if ref.accepts(index, payload):
                good[topic] = (ref, index), payload
            else:
                bad[topic] = ref, index
        if good:
            self._store.put_chunks(list(good.values()))
        for topic in good:
            del window.asked[topic]
            window.finished.append(topic)
        for topic, (ref, index) in bad.items():
            if topic not in good:
                self._refuse(window, topic, ref, index)
        return bool(good or bad)

    def _refuse(self, window: _Window, topic: str, ref: BlobRef, index: int) -> None:
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

    def _patience(self) -> float:
        return time.monotonic() + self._limits.fetch_timeout_s

    def _next(self, deadline: float) -> list[_Message]:
        """What has arrived, a window of messages at most: silence where none came in time."""
        arrived: list[_Message] = []
        while not arrived and (left := deadline - time.monotonic()) > 0:
            if not self._aborted():
                with suppress(queue.Empty):
                    arrived.append(self._arrived.get(timeout=min(left, 0.25)))
                    for _ in range(self._limits.fetch_window - 1):
                        arrived.append(self._arrived.get_nowait())
            if self._aborted():
                raise RoundAborted("the round ended while its blobs were fetched")
        return arrived or [_SILENCE]
