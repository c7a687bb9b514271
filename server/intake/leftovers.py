"""Retained messages that devices leave at the broker where none may be.

A broker keeps them until somebody erases them, so one device could fill its memory. A live message shows that it is retained
in MQTT 5 only. In MQTT 3.1.1 only a new subscription brings what is retained (3.3.1.3), and in both what was lost on a full
connection. So the server subscribes again now and then.
"""

from __future__ import annotations

import time

from edgefl.wire.mqtt.connection import AS_PUBLISHED
from edgefl.wire.mqtt.session import Incoming, Session
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

    def subscribe(self, *, shards: bool) -> None:
        """Subscribe to updates, of ``shards`` too if no worker does.

        Mosquitto keeps the options of the first subscription to a filter: call this before the session starts.
        """
        self._session.subscribe(self._filters if shards else self._filters[:1], qos=1 | AS_PUBLISHED)
        self._next = time.monotonic() + SWEEP_S

    def step(self, *, shards: bool) -> float:
        """Subscribe again if it is time. Return the seconds until the next time."""
        if time.monotonic() >= self._next and self._session.settled:
            self.subscribe(shards=shards)
        return max(0.1, self._next - time.monotonic())

    def erase(self, message: Incoming) -> bool:
        """Erase ``message`` if it is retained and may not be. Return True if it was."""
        _, _, leaf = message.topic.removeprefix(self._below).partition("/")
        if not message.retained or not message.topic.startswith(self._below) or leaf in _MAY_RETAIN:
            return False
        self._session.publish(message.topic, b"", qos=0, retain=True)
        return True
