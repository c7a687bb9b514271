"""Clients of the broker that belong to nobody: one that listens to everything, and one that sends anything."""

from __future__ import annotations

import queue

from edgefl.wire.errors import BrokerError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.session import Delivery, Incoming, Session
from edgefl.wire.mqtt.topics import Topics

_AHEAD = 64
_WAIT_S = 30.0


class Listener:
    """Hears all that is sent in a federation."""

    def __init__(self, broker: Address, federation: str) -> None:
        self._session = Session(broker, "edgefl-fuzz-listens", limits=Limits(), clean=True)
        self._session.subscribe([f"{Topics(federation).root}/#"])

    def __enter__(self) -> Listener:
        self._session.start()
        return self

    def heard(self) -> list[tuple[str, bytes]]:
        """Topics and payloads so far."""
        found: list[tuple[str, bytes]] = []
        while True:
            try:
                event = self._session.inbox.get_nowait()
            except queue.Empty:
                return found
            if isinstance(event, Incoming) and event.payload:
                found.append((event.topic, event.payload))

    def __exit__(self, *_: object) -> None:
        self._session.stop()


class Sender:
    """Publishes with QoS 1, a few messages ahead of the broker: none is lost on the way to it."""

    def __init__(self, broker: Address) -> None:
        self._session = Session(broker, "edgefl-fuzz-sends", limits=Limits(), clean=True)
        self._flying: list[Delivery] = []

    def __enter__(self) -> Sender:
        self._session.start()
        return self

    def send(self, topic: str, payload: bytes) -> None:
        self._flying.append(self._session.publish(topic, payload))
        if len(self._flying) >= _AHEAD:
            if not all(delivery.wait(_WAIT_S) for delivery in self._flying):
                raise BrokerError(f"the broker took no message in {_WAIT_S:g} s; see its log")
            self._flying.clear()

    def __exit__(self, *_: object) -> None:
        self._session.stop()
