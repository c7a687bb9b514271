"""Encoding and decoding of the MQTT 3.1.1 packets that a device sends and receives.

A client library has threads for each connection, too many for ten thousand connections in one process. ::

    socket.send(connect("edgefl:device:demo:load-1", keepalive_s=20))
    for packet in parser.feed(socket.recv(65536)):
        match packet.kind: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgefl.errors import ProtocolError
from edgefl.wire.mqtt.events import Will

CONNACK, PUBLISH, PUBACK, SUBACK, UNSUBACK, PINGRESP = 2, 3, 4, 9, 11, 13
PING, GOODBYE = b"\xc0\x00", b"\xe0\x00"
MOST_BYTES = 1 << 26
"""Largest packet that is read: announcements are far smaller, and a broken stream must not fill the memory."""

_LENGTH_DIGITS = 4
_CLEAN, _WILL, _PASSWORD, _USER = 0x02, 0x2C, 0x40, 0x80  # the will: QoS 1, retained
_HEAD, _NUMBER = 2, 2


@dataclass(frozen=True, slots=True)
class Packet:
    """Received packet.

    Attributes:
        kind: MQTT's number of the packet type.
        number: packet identifier; for CONNACK the return code.
        topic, payload, qos: fields of PUBLISH.
        resumed: "session present" of CONNACK.
        codes: return codes of SUBACK.
    """

    kind: int
    number: int = 0
    topic: str = ""
    payload: bytes = b""
    qos: int = 0
    resumed: bool = False
    codes: bytes = b""


def connect(
    client_id: str,
    *,
    keepalive_s: int,
    will: Will | None = None,
    clean: bool = False,
    username: str = "",
    password: str = "",
) -> bytes:
    """Return a CONNECT packet, with user name and password if there is a name."""
    flags = (_CLEAN if clean else 0) | (_WILL if will else 0)
    flags |= (_USER | _PASSWORD if password else _USER) if username else 0
    parts = [_text("MQTT"), bytes((4, flags)), keepalive_s.to_bytes(2), _text(client_id)]
    if will is not None:
        parts += [_text(will.topic), len(will.payload).to_bytes(2), will.payload]
    if username:
        parts.append(_text(username))
        parts += [_text(password)] if password else []
    return _packet(0x10, b"".join(parts))


def subscribe(number: int, topics: Sequence[str], qos: int) -> bytes:
    """Return a SUBSCRIBE packet for several filters."""
    return _packet(0x82, number.to_bytes(2) + b"".join(_text(topic) + bytes((qos,)) for topic in topics))


def unsubscribe(number: int, topics: Sequence[str]) -> bytes:
    """Return an UNSUBSCRIBE packet for several filters."""
    return _packet(0xA2, number.to_bytes(2) + b"".join(_text(topic) for topic in topics))


def puback(number: int) -> bytes:
    """Return a PUBACK packet."""
    return b"\x40\x02" + number.to_bytes(2)


def publish_head(topic: str, payload_bytes: int, *, number: int = 0, retain: bool = False) -> bytes:
    """Return a PUBLISH packet up to its payload: QoS 1 with a ``number``, else QoS 0."""
    name = _text(topic)
    tail = number.to_bytes(2) if number else b""
    kind = 0x30 | (0x02 if number else 0) | (0x01 if retain else 0)
    return bytes((kind,)) + _length(len(name) + len(tail) + payload_bytes) + name + tail


class Parser:
    """Splitter of a stream into packets. Raises ProtocolError for a stream that is not MQTT."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Yield the packets that ``data`` completes, in order."""
        data = self._rest + data if self._rest else data
        start = 0
        try:
            while (found := _measure(data, start)) is not None:
                first, end = found
                yield _read(data[start], data[first:end])
                start = end
        finally:
            self._rest = data[start:]


def _measure(data: bytes, start: int) -> tuple[int, int] | None:
    """Return begin and end of the body of the packet at ``start``, or None while it is incomplete."""
    length, shift = 0, 0
    for place in range(start + 1, start + 1 + _LENGTH_DIGITS):
        if place >= len(data):
            return None
        length |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            break
        shift += 7
    else:
        raise ProtocolError("the broker sent a packet whose length has no end: is this MQTT?")
    if length > MOST_BYTES:
        raise ProtocolError(f"the broker sent a packet of {length} bytes, more than {MOST_BYTES}")
    end = place + 1 + length
    return (place + 1, end) if end <= len(data) else None


def _read(head: int, body: bytes) -> Packet:
    kind = head >> 4
    if kind == PUBLISH:
        return _read_publish(head, body)
    if kind == PINGRESP:
        return Packet(kind)
    if len(body) < _HEAD or kind not in (CONNACK, PUBACK, SUBACK, UNSUBACK):
        raise ProtocolError(
            f"the broker sent a packet of kind {kind} with {len(body)} bytes: is this MQTT 3.1.1?"
        )
    if kind == CONNACK:
        return Packet(kind, body[1], resumed=bool(body[0] & 1))
    return Packet(kind, int.from_bytes(body[:_NUMBER]), codes=body[_NUMBER:])


def _read_publish(head: int, body: bytes) -> Packet:
    qos = head >> 1 & 3
    after = _HEAD + int.from_bytes(body[:_HEAD])
    start = after + (_NUMBER if qos else 0)
    if len(body) < start:
        raise ProtocolError(
            f"the broker sent a PUBLISH of {len(body)} bytes that should have at least {start}"
        )
    try:
        topic = body[_HEAD:after].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the broker sent a topic that is no text: {error}") from error
    return Packet(PUBLISH, int.from_bytes(body[after:start]), topic, body[start:], qos)


def _packet(head: int, body: bytes) -> bytes:
    return bytes((head,)) + _length(len(body)) + body


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2) + data


def _length(count: int) -> bytes:
    """Return MQTT's variable length: 7 bits per byte, the lowest first."""
    found = bytearray()
    while count >= 0x80:
        found.append(count & 0x7F | 0x80)
        count >>= 7
    found.append(count)
    return bytes(found)
