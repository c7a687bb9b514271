"""A TCP proxy in front of a broker that reads MQTT on the broker's side: every PUBLISH packet, as it lies on the wire."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import Literal

from edgefl.wire.mqtt.address import Address

Direction = Literal["in", "out"]
_PUBLISH = 3


@dataclass(frozen=True)
class Publish:
    """One packet. ``direction``: into the broker, or out of it."""

    direction: Direction
    topic: str
    payload: int
    wire: int
    content: bytes


class Tap:
    """Passes connections on to ``broker`` and keeps what was published, in the order in which it was read."""

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._packets: list[Publish] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname(), mqtt="3.1.1")  # whose packets are counted

    def packets(self, direction: Direction, part: str = "") -> list[Publish]:
        """Those in one direction whose topic contains ``part``."""
        with self._lock:
            return [p for p in self._packets if p.direction == direction and part in p.topic]

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = socket.create_connection((self._broker.host, self._broker.port))
            self._sockets += [client, broker]
            for source, target, direction in ((client, broker, "in"), (broker, client, "out")):
                threading.Thread(target=self._pass, args=(source, target, direction), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        waiting = b""
        try:
            while data := source.recv(1 << 16):
                waiting = self._read(waiting + data, direction)
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def _read(self, data: bytes, direction: Direction) -> bytes:
        """Note every whole packet in ``data``; what is left."""
        while (size := _packet_size(data)) is not None and size <= len(data):
            packet, data = data[:size], data[size:]
            if packet[0] >> 4 == _PUBLISH:
                with self._lock:
                    self._packets.append(_publish(packet, direction))
        return data


def _packet_size(data: bytes) -> int | None:
    rest = 0
    for at, byte in enumerate(data[1:5]):
        rest |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return 2 + at + rest
    return None


def _publish(packet: bytes, direction: Direction) -> Publish:
    body = 1
    while packet[body] >= 0x80:
        body += 1
    body += 1
    length = int.from_bytes(packet[body : body + 2], "big")
    topic = packet[body + 2 : body + 2 + length].decode()
    identifier = 2 if packet[0] & 0x06 else 0
    content = packet[body + 2 + length + identifier :]
    return Publish(direction, topic, len(content), len(packet), content)
