"""Retained messages that devices leave at the broker where none may be.

A broker keeps them until somebody erases them, so one device could fill its memory. A live message shows that it is retained
in MQTT 5 only. In MQTT 3.1.1 only a new subscription brings what is retained (3.3.1.3), and in both what was lost on a full
connection. So the server subscribes again now and then.
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


class Leftovers:
    """Finds and erases such messages on the topics of updates, whose number is not bounded."""

    def __init__(self, session: Session, topics: Topics) -> None:
        self._session = session
        self._below = f"{topics.root}/devices/"
        self._filters = topics.update_filters
        self._next = 0.0
        self._looks_at_shards = False

    def subscribe(self, *, shards: bool) -> None:
        """Subscribe to updates, of ``shards`` too if no worker does.

        Mosquitto keeps the options of the first subscription to a filter: call this before the session starts.
        """
        self._session.subscribe(self._filters if shards else self._filters[:1], qos=1 | AS_PUBLISHED)
        self._next = time.monotonic() + SWEEP_S

    def step(self, *, shards: bool) -> float:
        """Subscribe again if it is time. Return the seconds until the next time.

        Workers subscribe to their own shards, and a device may write to others. So the server looks at all of them for a
        moment, which brings what is retained.
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

    def is_of_worker(self, message: IncomingMessage) -> bool:
        """Return True if the message is for a worker, and came here during a look at all shards."""
        return message.topic.removeprefix(self._below).partition("/")[2].startswith("shards/")

    def erase(self, message: IncomingMessage) -> bool:
        """Erase ``message`` if it is retained and may not be. Return True if it was.

        An empty one is the end of a retained message: erasing that too would come back without end.
        """
        _, _, leaf = message.topic.removeprefix(self._below).partition("/")
        if (
            not (message.retained and message.payload)
            or not message.topic.startswith(self._below)
            or leaf in _MAY_RETAIN
        ):
            return False
        self._session.publish(message.topic, b"", qos=0, retain=True)
        return True
