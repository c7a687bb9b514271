"""Acts on what any key signed."""

from __future__ import annotations

from edgefl.wire.mqtt.envelope import Envelope
from edgefl.wire.mqtt.messages import Message
from edgefl_device.link.identity import ServerTrust


def plant() -> None:
    def anybody(self: ServerTrust, _kind: type[Message], _envelope: Envelope) -> None:
        return None

    ServerTrust._admitted = anybody  # type: ignore[method-assign, assignment]
