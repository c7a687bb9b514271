"""Acts on messages that nobody signed, though it knows the key of the server."""

from __future__ import annotations

from device_runtime.link.identity import ServerTrust
from edgefl.wire.mqtt.messages import AnyMessage, decode


def plant() -> None:
    def taken(self: ServerTrust, kind: type[AnyMessage], _topic: str, payload: bytes) -> AnyMessage:
        return decode(kind, payload)

    ServerTrust._unsigned = taken  # type: ignore[method-assign, assignment]
