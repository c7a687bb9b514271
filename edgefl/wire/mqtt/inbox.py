"""What arrived and was not looked at yet, in bounded memory.

A full inbox makes the network thread wait, so that the flood stays in the broker and on the wire. It does not wait for
ever: the connection has to be kept alive, so a message that finds no room for a while is dropped, and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Generic, TypeVar

Item = TypeVar("Item")

OVERHEAD_BYTES = 512
"""What a message takes in memory beside its payload."""


class Inbox(Generic[Item]):
    """A queue of events, of which those with a ``payload`` are bounded in number and bytes; others always find room.

    ``patience_s``: how long :meth:`put` waits for room. ``dropped`` counts the messages that found none.
    """

    def __init__(self, *, messages: int, nbytes: int, patience_s: float = 2.0) -> None:
        self._messages = messages
        self._nbytes = nbytes
        self._patience_s = patience_s
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._held = 0
        self._held_bytes = 0
        self.dropped = 0

    def put(self, item: Item) -> None:
        """Add ``item``. One without a payload never waits: a signal handler may put it."""
        payload = getattr(item, "payload", None)
        if payload is None or self._has_room(len(payload) + OVERHEAD_BYTES):
            self._queue.put(item)

    def get(self, timeout: float | None = None) -> Item:
        """The oldest; queue.Empty if none comes within ``timeout`` seconds."""
        item = self._queue.get(timeout=timeout)
        payload = getattr(item, "payload", None)
        if payload is not None:
            with self._room:
                self._held -= 1
                self._held_bytes -= len(payload) + OVERHEAD_BYTES
                self._room.notify()
        return item

    def get_nowait(self) -> Item:
        """The oldest; queue.Empty if there is none."""
        return self.get(timeout=0.0)

    def empty(self) -> bool:
        """Whether nothing waits at this moment."""
        return self._queue.empty()

    def qsize(self) -> int:
        """How many wait at this moment."""
        return self._queue.qsize()

    def _has_room(self, size: int) -> bool:
        deadline = time.monotonic() + self._patience_s
        with self._room:
            while self._held and (
                self._held >= self._messages or self._held_bytes + size > self._nbytes
            ):  # one message is always taken
                left = deadline - time.monotonic()
                if left <= 0:
                    self.dropped += 1
                    return False
                self._room.wait(left)
            self._held += 1
            self._held_bytes += size
        return True
