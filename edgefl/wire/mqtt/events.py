"""Events of a broker session, and the bounded inbox that holds them in order.

A full inbox blocks the network thread, so that further messages stay with the broker. It blocks for a limited time
only, because the connection must be kept alive. After that the message is dropped and counted.
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
    """Last will: a retained message that the broker publishes when the connection breaks."""

    topic: str
    payload: bytes

    def current_will(self) -> Will:
        """Return this will itself, which makes :class:`Will` a :class:`WillSource`."""
        return self


class WillSource(Protocol):
    """Interface of an object that provides the last will of each connection."""

    def current_will(self) -> Will:
        """Return the last will for a connection that is about to be opened."""


@dataclass(frozen=True)
class Connected:
    """Event: the connection is established.

    Attributes:
        resumed: True if the broker kept the session. If it is False, publish and subscribe again.
    """

    resumed: bool


@dataclass(frozen=True)
class Disconnected:
    """Event: the connection broke or could not be established. The session tries again by itself.

    Attributes:
        reason: Text for people.
        retry_s: Seconds until the next attempt.
        rival: True if the broker ends each new connection within seconds, probably because another client has the same
            id and both take over each other's session. MQTT 3.1.1 has no reason code for this.
        limit: Limit of the broker that a message of ours exceeds, with a remedy; "" if none is known.
        waiting: True if the connection is open and the broker sent no CONNACK so far.
    """

    reason: str
    retry_s: float
    rival: bool = False
    limit: str = ""
    waiting: bool = False


@dataclass(frozen=True)
class IncomingMessage:
    """Event: a message arrived.

    Attributes:
        topic: MQTT topic.
        payload: Payload.
        retained: True if the broker had stored the message and sent it because of our subscription.
    """

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Refusal:
    """Event: the broker refused a request of this client.

    A broker of MQTT 3.1.1 reports only refused subscriptions, and silently drops forbidden messages.

    Attributes:
        action: Kind of the request.
        topic: MQTT topic or filter of the request.
        reason: Text of the broker's reason code.
        limit: Limit of the broker that the message exceeds, with a remedy; "" if none is known.
        waiting: Always False, so that code can read it from a :class:`Disconnected` and a :class:`Refusal` alike.
    """

    action: Literal["subscribe", "unsubscribe", "publish"]
    topic: str
    reason: str
    limit: str = ""
    waiting: bool = False

    def text(self, address: Address) -> str:
        """Return the error text: topic, reason and remedy."""
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
    """Event without content, from :meth:`Session.wake`: the state of this process changed, so the reader
    should check it.
    """


def check_limit(event: object, address: Address) -> None:
    """Raise BrokerError if ``event`` reports that a message exceeds a limit of the broker. No retry would succeed."""
    if isinstance(event, Disconnected | Refusal) and event.limit:
        raise BrokerError(f"the broker at {address} {event.limit}")


Event = Connected | Disconnected | IncomingMessage | Refusal | Wakeup


Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)

OVERHEAD_BYTES = 512
"""Memory that a message takes besides its payload."""


class EventSink(Protocol[Item_contra]):
    """Interface of a receiver of events, such as :class:`Inbox`."""

    def put(self, item: Item_contra, /) -> None:
        """Receive one event. Must not block for long."""


class Inbox(Generic[Item]):
    """Thread-safe queue of events. Items with a ``payload`` are limited in number and bytes; others are always accepted.

    Args:
        messages: Most messages.
        nbytes: Most bytes of messages.
        patience_s: Longest time in seconds that :meth:`put` waits for room.

    Attributes:
        dropped: Number of messages that were dropped for lack of room.
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
        """Add ``item``. Waits for room if it has a payload, and drops it if there is none in time.

        An item without a payload never blocks, so a signal handler may add one.
        """
        payload = getattr(item, "payload", None)
        if payload is None or self._has_room(len(payload) + OVERHEAD_BYTES):
            self._queue.put(item)

    def get(self, timeout: float | None = None) -> Item:
        """Remove and return the oldest item.

        Args:
            timeout: Longest wait in seconds. None: unlimited.

        Raises:
            queue.Empty: No item arrived in time.
        """
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
        """Return True if the inbox is empty at this moment."""
        return self._queue.empty()

    def qsize(self) -> int:
        """Return the number of items at this moment."""
        return self._queue.qsize()

    def _has_room(self, size: int) -> bool:
        """Reserve room for a message of ``size`` bytes, waiting for it if needed. Return False if there is none in time."""
        deadline = time.monotonic() + self._patience_s
        with self._room:
            # One message is always taken.
            while self._held and (self._held >= self._messages or self._held_bytes + size > self._nbytes):
                left = deadline - time.monotonic()
                if left <= 0:
                    self.dropped += 1
                    return False
                self._room.wait(left)
            self._held += 1
            self._held_bytes += size
        return True
