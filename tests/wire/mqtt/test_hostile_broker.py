"""A broker that sends what no honest one does: the session hangs up before it holds any of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Literal

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.connection import make_client
from edgefl.wire.mqtt.events import Disconnected, IncomingMessage
from edgefl.wire.mqtt.session import Session
from tests.wire.mqtt.events import wait_for

_PIECE = bytes(64 * 1024)
_MOST_SENT = 64 << 20
BUFFERS = 16 << 20
"""What the system's own buffers may hold between two ends."""


def packet(first: int, body: bytes) -> bytes:
    size, header = len(body), bytearray([first])
    while size > 127:
        header.append(size & 127 | 128)
        size >>= 7
    return bytes(header) + bytes([size]) + body


QOS_2 = b"".join(packet(0x34, b"\x00\x03a/b" + mid.to_bytes(2) + _PIECE) for mid in range(1, 65))
ANSWERED = b"".join(packet(0x32, b"\x00\x03a/b" + mid.to_bytes(2)) for mid in range(1, 20_001))
"""Messages that are acknowledged, one by one."""
PROPERTIES = b"\x26\x00\x00\x00\x00" * 200_000  # empty user properties
Attack = tuple[str, Literal["5", "3.1.1"], bytes, bytes, str]
ATTACKS: list[Attack] = [
    ("qos-2", "3.1.1", QOS_2, QOS_2, "QoS 2"),
    ("qos-2-without-a-body", "3.1.1", b"\x34\xff\xff\xff\x7f", b"", "QoS 2"),
    ("largest-publish", "3.1.1", b"\x30\xff\xff\xff\x7f", _PIECE, "268435455 bytes"),
    ("publish-above-the-limit", "3.1.1", b"\x32\x80\x80\x80\x04", _PIECE, "8388608 bytes"),
    ("large-suback", "3.1.1", b"\x90\x80\x80\x40", _PIECE, "1048576 bytes"),
    ("properties", "5", packet(0x30, b"\x00\x03a/b\xc0\x84\x3d" + PROPERTIES), b"", "properties"),
]


class HostileBroker:
    """Greets one client and sends it ``first``, then ``more`` again and again, each after ``pause_s``. ``sent`` counts the
    bytes."""

    def __init__(
        self, version: Literal["5", "3.1.1"], first: bytes, more: bytes, pause_s: float = 0.0
    ) -> None:
        self._pause_s = pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1], mqtt=version)
        connack = b"\x20\x03\x00\x00\x00" if version == "5" else b"\x20\x02\x00\x00"
        self.sent = 0
        self.thread = threading.Thread(target=self._serve, args=(connack + first, more), daemon=True)
        self.thread.start()

    def _serve(self, first: bytes, more: bytes) -> None:
        connection, _ = self._listener.accept()
        with connection, suppress(OSError):
            connection.settimeout(20)
            connection.recv(1000)
            connection.sendall(first)
            for piece in repeat(more) if more else ():
                time.sleep(self._pause_s)
                connection.sendall(piece)
                self.sent += len(piece)
                if self.sent > _MOST_SENT:
                    break
            connection.recv(1000)

    def stop(self) -> None:
        self._listener.close()
        self.thread.join(20)


@pytest.fixture(params=ATTACKS, ids=lambda attack: attack[0])
def attack(request: pytest.FixtureRequest) -> Iterator[tuple[HostileBroker, str]]:
    _, version, first, more, text = request.param
    broker = HostileBroker(version, first, more)
    yield broker, text
    broker.stop()


def test_it_hangs_up_before_it_holds_what_no_honest_broker_sends(attack: tuple[HostileBroker, str]) -> None:
    broker, text = attack
    session = Session(broker.address, "device", limits=Limits(reconnect_min_s=10.0))
    session.start()
    try:
        down = wait_for(session, Disconnected)
        assert text in down.reason
        assert (
            not session._client._in_messages
            and len(session._client._in_packet["packet"]) <= len(PROPERTIES) + 100
        )
        broker.thread.join(20)
        assert broker.sent <= BUFFERS
    finally:
        session.stop(drain_s=0.1)


def test_a_broker_that_reads_nothing_is_left() -> None:
    """Each of its messages is to be acknowledged, and the acknowledgements wait here."""
    client = make_client(Address("127.0.0.1", 1), "device", clean=True, max_inflight=1, most_bytes=1 << 20)
    ours, _theirs = socket.socketpair()
    client._sock = ours
    client._out_packet.extend(repeat({}, 50_001))  # type: ignore[typeddict-item]
    with pytest.raises(ConnectionAbortedError, match="the broker reads none of"):
        client._sock_recv(1)


def test_messages_up_to_the_limit_are_read() -> None:
    body = b"\x00\x03a/b" + bytes(4 << 20)
    broker = HostileBroker("3.1.1", packet(0x30, body), b"")
    session = Session(broker.address, "device", limits=Limits())
    session.start()
    try:
        assert len(wait_for(session, IncomingMessage).payload) == 4 << 20
    finally:
        session.stop(drain_s=0.1)
        broker.stop()
