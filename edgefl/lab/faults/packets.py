"""MQTT's packets in a stream of bytes, as far as a link between a client and a broker has to know them."""

from __future__ import annotations

_PUBLISH, _DUP, _QOS = 0x30, 0x08, 0x06
_LENGTH_BYTES = 4
_WEBSOCKET = b"GET ", b"HTTP"
"""How either side of MQTT over WebSocket begins; by MQTT's rules it would be a packet of the reserved flags 7 or 8."""


class Packets:
    """Cuts a stream into packets. What is no MQTT, such as TLS or WebSocket, goes through as it came."""

    def __init__(self) -> None:
        self._held = b""
        self._opaque = False

    def feed(self, data: bytes) -> list[bytes]:
        """The packets that are whole now."""
        if self._opaque:
            return [data]
        self._held += data
        if self._held.startswith(_WEBSOCKET):
            self._opaque, rest, self._held = True, self._held, b""
            return [rest]
        whole: list[bytes] = []
        while (size := _size(self._held)) is not None:
            if size == 0:
                self._opaque, rest, self._held = True, self._held, b""
                return [*whole, rest]
            if len(self._held) < size:
                break
            whole.append(self._held[:size])
            self._held = self._held[size:]
        return whole


def _size(data: bytes) -> int | None:
    """Bytes of the packet that begins here; None where too little came to tell, 0 where it is no packet."""
    if data[:1] and not 0x10 <= data[0] <= 0xF0:
        return 0
    length = 0
    for at, byte in enumerate(data[1 : 1 + _LENGTH_BYTES]):
        length |= (byte & 0x7F) << (7 * at)
        if not byte & 0x80:
            return 2 + at + length
    return 0 if len(data) > _LENGTH_BYTES else None


def second_copy(packet: bytes) -> bytes | None:
    """The packet as a sender repeats it: a PUBLISH, marked as a duplicate where it can be; None for any other."""
    if packet[0] & 0xF0 != _PUBLISH:
        return None
    return bytes([packet[0] | (_DUP if packet[0] & _QOS else 0)]) + packet[1:]
