"""Says that it leaves to whoever listens just then: the broker keeps that it is online."""

from __future__ import annotations

from typing import Any

from edgefl.wire.mqtt.messages import Message, Status
from edgefl_device.agent import Agent

_publish = Agent._publish


def plant() -> None:
    def passing(self: Agent, topic: str, message: Message, *, retain: bool = False) -> Any:
        leaving = isinstance(message, Status) and not message.online
        return _publish(self, topic, message, retain=retain and not leaving)

    Agent._publish = passing  # type: ignore[method-assign]
