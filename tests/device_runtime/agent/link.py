"""A server made of scripts, and a device's inbox that can be tampered with: both on a real broker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from edgefl.wire.blobs import BlobRef, describe, split
from edgefl.wire.mqtt.events import Connected, IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher

PATIENCE_S = 300.0


def publish_blob(session: Session, topics: Topics, data: bytes, chunk: int) -> BlobRef:
    """Publish ``data`` as the server does, and wait until the broker has it."""
    ref = describe(data, chunk)
    deliveries = [
        session.publish(topics.blob_chunk(ref.sha256, index), piece, retain=True)
        for index, piece in enumerate(split(data, chunk))
    ]
    assert all(delivery.wait(PATIENCE_S) for delivery in deliveries)
    return ref


class Recorder:
    """A session as fetching sees it; remembers every subscription and how many stood at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.asked: list[str] = []
        self.standing: set[str] = set()
        self.most = 0

    @property
    def connected(self) -> bool:
        return self._session.connected

    def subscribe(self, topics: Sequence[str], qos: int = 1, *, standing: bool = True) -> None:
        self.asked += topics
        self.standing.update(topics)
        self.most = max(self.most, len(self.standing))
        self._session.subscribe(topics, qos, standing=standing)

    def unsubscribe(self, topics: Sequence[str]) -> None:
        self.standing.difference_update(topics)
        self._session.unsubscribe(topics)


class Inbox:
    """Reads a session as the agent does; ``on_chunk`` sees every chunk first and may do something about it."""

    def __init__(self, session: Session, on_chunk: Callable[[str, bytes], None] = lambda *_: None) -> None:
        self._session = session
        self._on_chunk = on_chunk
        self._fetchers: list[Fetcher] = []
        self._stopping = threading.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.chunks: list[str] = []
        assert self._up.wait(PATIENCE_S)

    def serve(self, fetcher: Fetcher) -> None:
        self._fetchers = [fetcher]

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                event = self._session.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            if isinstance(event, Connected):
                self._up.set()
                for fetcher in self._fetchers:
                    fetcher.poke()
            elif isinstance(event, IncomingMessage):
                self.chunks.append(event.topic)
                self._on_chunk(event.topic, event.payload)
                for fetcher in self._fetchers:
                    fetcher.deliver(event.topic, event.payload)
