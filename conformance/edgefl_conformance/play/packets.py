"""Reader of an agent's MQTT packets (3.1.1 and 5): CONNECT, SUBSCRIBE and DISCONNECT."""

from __future__ import annotations

from dataclasses import dataclass

_CONNECT, _SUBSCRIBE, _DISCONNECT = 1, 8, 14
_FIVE = 5
_MORE = 0x80


@dataclass(frozen=True)
class Connect:
    """A CONNECT packet."""

    client_id: str
    clean: bool
    keepalive_s: int
    version: int
    will_topic: str = ""
    will_payload: bytes = b""
    will_qos: int = 0
    will_retained: bool = False


@dataclass(frozen=True)
class Subscribe:
    """One filter of a SUBSCRIBE packet."""

    topic: str
    qos: int


@dataclass(frozen=True)
class Disconnect:
    """A DISCONNECT packet."""


Packet = Connect | Subscribe | Disconnect


class PacketReader:
    """Reader of one connection's bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._version = 4

    def feed(self, data: bytes) -> list[Packet]:
        """Return the packets that end in ``data``."""
        self._rest += data
        found: list[Packet] = []
        while (ends := _length(self._rest, 1)) is not None and sum(ends) <= len(self._rest):
            start, end = ends[0], sum(ends)
            packet = bytes(self._rest[start:end])
            kind = self._rest[0] >> 4
            del self._rest[:end]
            found += self._read(kind, packet)
        return found

    def _read(self, kind: int, body: bytes) -> list[Packet]:
        if kind == _CONNECT:
            connect = _connect(_PacketFields(body))
            self._version = connect.version
            return [connect]
        if kind == _SUBSCRIBE:
            return list(_subscribe(_PacketFields(body), self._version))
        return [Disconnect()] if kind == _DISCONNECT else []


class _PacketFields:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        self._at += count
        return self._body[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def data(self) -> bytes:
        return self.take(self.number(2))

    def text(self) -> str:
        return self.data().decode("utf-8", "replace")

    def skip_properties(self) -> None:
        start, size = _length(self._body, self._at) or (self._at, 0)
        self._at = start + size

    @property
    def left(self) -> bool:
        return self._at < len(self._body)


def _connect(fields: _PacketFields) -> Connect:
    fields.data()
    version, flags, keepalive = fields.number(1), fields.number(1), fields.number(2)
    if version == _FIVE:
        fields.skip_properties()
    client_id, topic, payload = fields.text(), "", b""
    if flags & 0x04:
        if version == _FIVE:
            fields.skip_properties()
        topic, payload = fields.text(), fields.data()
    return Connect(
        client_id=client_id,
        clean=bool(flags & 0x02),
        keepalive_s=keepalive,
        version=version,
        will_topic=topic,
        will_payload=payload,
        will_qos=flags >> 3 & 3,
        will_retained=bool(flags & 0x20),
    )


def _subscribe(fields: _PacketFields, version: int) -> list[Subscribe]:
    fields.take(2)
    if version == _FIVE:
        fields.skip_properties()
    found = []
    while fields.left:
        topic = fields.text()
        found.append(Subscribe(topic, fields.number(1) & 3))
    return found


def _length(data: bytes | bytearray, first: int) -> tuple[int, int] | None:
    """Return begin and length of the part whose length is at ``first``; None while the length is incomplete."""
    size = 0
    for at in range(first, len(data)):
        size += (data[at] & ~_MORE) << 7 * (at - first)
        if not data[at] & _MORE:
            return at + 1, size
    return None
