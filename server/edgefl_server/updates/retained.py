"""Removal of retained messages on topics where devices must not retain any.

A broker keeps a retained message until a client removes it, so one device could fill the broker's memory. In MQTT 5 a
live message shows that it is retained. In MQTT 3.1.1 the broker sends retained messages for a new subscription only
(3.3.1.3). In both, a full connection may lose messages. So the server repeats its subscription at intervals.
"""

from __future__ import annotations

import time

from edgefl.wire.mqtt.connection import AS_PUBLISHED
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics

SWEEP_S = 2.0
"""Seconds between two subscriptions."""
_MAY_RETAIN = ("status", "hello")


class RetainedMessageCleaner:
    """Cleaner of messages that devices retained on the topics of updates, whose number is unbounded.

    It subscribes ``session`` to these topics again at intervals (:meth:`step`), and :meth:`erase` clears what arrives.
    """

    def __init__(self, session: Session, topics: Topics) -> None:
        self._session = session
        self._prefix = f"{topics.root}/devices/"
        self._filters = topics.update_filters
        self._next = 0.0
        self._looks_at_shards = False

    def subscribe(self, *, shards: bool) -> None:
        """Subscribe to the topics of updates. Must be called before the session starts: Mosquitto keeps the first
        options.

        Args:
            shards: True to subscribe to the topics of shards as well, because there are no workers.
        """
        self._session.subscribe(self._filters if shards else self._filters[:1], qos=1 | AS_PUBLISHED)
        self._next = time.monotonic() + SWEEP_S

    def step(self, *, shards: bool) -> float:
        """Repeat the subscription if that is due. Return the seconds until the next call.

        Workers subscribe to their own shards only, but a device may publish to others. So the server subscribes to all
        topics for a moment, and the broker delivers the retained messages.

        Args:
            shards: True to stay subscribed to the topics of shards, because there are no workers.
        """
        if self._looks_at_shards and self._session.settled:
            self._session.unsubscribe(self._filters[1:])
            self._looks_at_shards = False
        if time.monotonic() >= self._next and self._session.settled:
            self.subscribe(shards=shards)
            if not shards:
                self._session.subscribe(self._filters[1:], qos=1 | AS_PUBLISHED, standing=False)
                self._looks_at_shards = True
        return max(0.1, self._next - time.monotonic()) if not self._looks_at_shards else 0.1

    def is_for_worker(self, message: IncomingMessage) -> bool:
        """Return True if the message's topic belongs to a shard, so that a worker receives the message too."""
        return message.topic.removeprefix(self._prefix).partition("/")[2].startswith("shards/")

    def erase(self, message: IncomingMessage) -> bool:
        """Clear a message at the broker if it is retained on a topic where that is not allowed.

        Args:
            message: The received message. One without payload is ignored, because it is itself such a removal.

        Returns:
            True if the message was cleared.
        """
        _, _, leaf = message.topic.removeprefix(self._prefix).partition("/")
        if (
            not (message.retained and message.payload)
            or not message.topic.startswith(self._prefix)
            or leaf in _MAY_RETAIN
        ):
            return False
        self._session.publish(message.topic, b"", qos=0, retain=True)
        return True
