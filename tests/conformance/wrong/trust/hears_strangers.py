"""Acts on what any key signed."""

from __future__ import annotations

from device_runtime.link.identity import ServerTrust
from edgefl.wire.mqtt.envelope import Envelope
from edgefl.wire.mqtt.messages import Message


def plant() -> None:
    def anybody(self: ServerTrust, _kind: type[Message], _envelope: Envelope) -> None:
        return None

    ServerTrust._admitted = anybody  # type: ignore[method-assign, assignment]
