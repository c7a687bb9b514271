"""Events of a session, and the bounded inbox in which they arrive in order.

A full inbox blocks the network thread, so that a flood stays in the broker and on the wire. It does not block forever,
because the connection must be kept alive: after a timeout a message that finds no room is dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from edgefl.errors import BrokerError
from edgefl.wire.mqtt.address import Address


@dataclass(frozen=True)
class Will:
    """Last will: a retained message that the broker publishes if the connection is lost."""

    topic: str
    payload: bytes

    def current_will(self) -> Will:
        """Return itself: every connection has the same will."""
        return self


class WillSource(Protocol):
    """Source of a last will for each connection."""

    def current_will(self) -> Will:
        """Return the will of the connection that is about to be made."""


@dataclass(frozen=True)
class Connected:
    """The connection is established.

    ``resumed`` is False if the broker has no session of ours: publish and subscribe again.
    """

    resumed: bool


@dataclass(frozen=True)
class Disconnected:
    """The connection is lost or failed. A new attempt follows in ``retry_s`` seconds.

    Attributes:
        reason: Text for people.
        retry_s: Seconds until the next attempt.
        rival: The broker ends each new connection within moments. MQTT 3.1.1 has no reason code for this, but it happens if
            two clients have one id: each takes over the other's session.
        limit: Limit of the broker that one of our messages exceeds, with a remedy.
        waiting: The connection is open, and the broker sent no CONNACK yet.
    """

    reason: str
    retry_s: float
    rival: bool = False
    limit: str = ""
    waiting: bool = False


@dataclass(frozen=True)
class IncomingMessage:
    """A received message. ``retained``: the broker had stored it, and sent it because we subscribed."""

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Refusal:
    """The broker refused a request of ours.

    A broker of MQTT 3.1.1 reports refused subscriptions only, and silently drops forbidden messages. ``limit``: limit of the
    broker that the message exceeds, with a remedy.
    """

    action: Literal["subscribe", "unsubscribe", "publish"]
    topic: str
    reason: str
    limit: str = ""
    waiting: bool = False

    def text(self, address: Address) -> str:
        """Return the text for people: topic, reason and remedy."""
        if self.limit:
            return f"the broker at {address} {self.limit}"
        who = f"user {address.username!r}" if address.username else "this client"
        may = "write to" if self.action == "publish" else "read"
        return (
            f"the broker at {address} refuses to {self.action} {self.topic}: {self.reason}; its access list has to let "
            f"{who} {may} it (`edgefl acl` writes one)"
        )


@dataclass(frozen=True)
class Wakeup:
    """A change within this process, from :meth:`Session.wake`: the reader of the events checks its state."""


def check_limit(event: object, address: Address) -> None:
    """Raise BrokerError if ``event`` names a limit of the broker, which no retry can pass."""
    if isinstance(event, Disconnected | Refusal) and event.limit:
        raise BrokerError(f"the broker at {address} {event.limit}")


Event = Connected | Disconnected | IncomingMessage | Refusal | Wakeup


Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)

OVERHEAD_BYTES = 512
"""Memory of a message besides its payload."""


class EventSink(Protocol[Item_contra]):
    """Receiver of events. :class:`Inbox` is one."""

    def put(self, item: Item_contra, /) -> None:
        """Take one event without blocking for long."""


class Inbox(Generic[Item]):
    """Queue of events. Those with a ``payload`` are bounded in number and bytes, all others always fit.

    Args:
        messages: Most messages.
        nbytes: Most bytes of these messages.
        patience_s: Longest wait of :meth:`put` for room, in seconds.

    Attributes:
        dropped: Number of messages that found no room.
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
        """Add ``item``. An item without a payload never blocks, so a signal handler may add one."""
        payload = getattr(item, "payload", None)
        if payload is None or self._has_room(len(payload) + OVERHEAD_BYTES):
            self._queue.put(item)

    def get(self, timeout: float | None = None) -> Item:
        """Remove and return the oldest item. Raises queue.Empty if none arrives within ``timeout`` seconds."""
        item = self._queue.get(timeout=timeout)
        payload = getattr(item, "payload", None)
        if payload is not None:
            with self._room:
                self._held -= 1
                self._held_bytes -= len(payload) + OVERHEAD_BYTES
                self._room.notify()
        return item

    def get_nowait(self) -> Item:
        """Remove and return the oldest item. Raises queue.Empty if there is none."""
        return self.get(timeout=0.0)

    def empty(self) -> bool:
        """Return True if the inbox holds nothing at this moment."""
        return self._queue.empty()

    def qsize(self) -> int:
        """Return the number of items at this moment."""
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
