"""Acts on messages that nobody signed, though it knows the key of the server."""

from __future__ import annotations

from edgefl.wire.mqtt.messages import AnyMessage, decode
from edgefl_device.link.identity import ServerTrust


def plant() -> None:
    def taken(self: ServerTrust, kind: type[AnyMessage], _topic: str, payload: bytes) -> AnyMessage:
        return decode(kind, payload)

    ServerTrust._unsigned = taken  # type: ignore[method-assign, assignment]
