"""How many bytes an MQTT PUBLISH takes: what a broker counts as published, and with the packet's own header."""

from __future__ import annotations

from dataclasses import dataclass

_VARINT = 128


@dataclass(frozen=True)
class Traffic:
    """Bytes of PUBLISH packets: their payloads alone, and with MQTT's headers (TCP, TLS and acknowledgements are not in)."""

    payload: int = 0
    wire: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.wire + other.wire)

    @classmethod
    def of(cls, topic: str, payload: int, qos: int) -> Traffic:
        """One message of ``payload`` bytes on ``topic``."""
        return cls(payload, publish_bytes(topic, payload, qos))


def publish_bytes(topic: str, payload: int, qos: int) -> int:
    """Size of the PUBLISH packet (MQTT 3.1.1, 3.3): type and flags, the remaining length in 7 bits a byte, the topic
    behind its length in 2 bytes, a packet identifier above QoS 0, the payload."""
    rest = 2 + len(topic.encode()) + (2 if qos else 0) + payload
    digits = 1
    while rest >= _VARINT**digits:
        digits += 1
    return 1 + digits + rest
