"""Says that it leaves to whoever listens just then: the broker keeps that it is online."""

from __future__ import annotations

from typing import Any

from edgefl.wire.mqtt.messages import Message, Status
from edgefl_device.link.identity import SignedSession

_publish = SignedSession.publish


def plant() -> None:
    def passing(
        self: SignedSession, topic: str, message: Message, *, qos: int = 1, retain: bool = False
    ) -> Any:
        leaving = isinstance(message, Status) and not message.online
        return _publish(self, topic, message, qos=qos, retain=retain and not leaving)

    SignedSession.publish = passing  # type: ignore[method-assign]
