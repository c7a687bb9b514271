"""Looks at who is said to have signed, and at no signature."""

from __future__ import annotations

from edgefl.wire.mqtt.envelope import Envelope
from edgefl.wire.mqtt.messages import AnyMessage, decode
from edgefl_device.link import identity


def plant() -> None:
    def believed(kind: type[AnyMessage], _topic: str, envelope: Envelope) -> AnyMessage:
        return decode(kind, envelope.body)

    identity.verified = believed
