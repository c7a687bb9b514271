"""Brokers whose limits end connections."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Version
from edgefl.wire.mqtt.broker_limits import find_limit
from edgefl.wire.mqtt.events import Disconnected, Refusal
from edgefl.wire.mqtt.session import Session
from tests.conftest import Mosquitto


@pytest.mark.parametrize(
    ("line", "version", "named"),
    [
        ("message_size_limit 2000", "auto", "takes no messages of 3000 bytes"),
        ("max_packet_size 2000", "auto", "2000 at most"),
        ("max_packet_size 2000", "3.1.1", "takes no messages of 3000 bytes"),
        ("max_qos 0", "auto", "takes no messages of QoS 1"),
        ("retain_available false", "auto", "takes no retained messages"),
        ("retain_available false", "3.1.1", "takes no retained messages"),
    ],
)
def test_a_limit_of_the_broker_is_named(
    tmp_path: Path, limits: Limits, line: str, version: Version, named: str
) -> None:
    broker = Mosquitto(tmp_path, line)
    broker.start()
    session = Session(replace(broker.address, mqtt=version), "edgefl:server:limits", limits=limits)
    try:
        session.publish("edgefl/v1/limits/blobs/a/0", bytes(3000), retain=True)
        session.start()
        while True:
            event = session.inbox.get(timeout=20.0)
            if isinstance(event, Disconnected) and not event.limit:
                assert not event.rival
                session.publish("edgefl/v1/limits/blobs/a/0", bytes(3000), retain=True)
            elif isinstance(event, Disconnected | Refusal):
                break
    finally:
        session.stop(drain_s=0.0)
        broker.stop()

    assert named in event.limit


class _Link:
    """Link to a broker that breaks the connections of certain numbers once their CONNECT is through."""

    def __init__(self, port: int, breaks: Container[int]) -> None:
        self.sent: list[bytes] = []
        self._port = port
        self._breaks = breaks
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            broker = socket.create_connection(("127.0.0.1", self._port))
            number = len(self.sent)
            self.sent.append(b"")
            for task in (self._up, self._down):
                self._threads.append(
                    threading.Thread(target=task, args=(number, client, broker), daemon=True)
                )
                self._threads[-1].start()

    def _up(self, number: int, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):  # either end may be gone
            while piece := client.recv(65536):
                if number in self._breaks and self.sent[number]:
                    client.shutdown(socket.SHUT_RDWR)
                    break
                self.sent[number] += piece
                broker.sendall(piece)
            broker.shutdown(socket.SHUT_RDWR)

    def _down(self, _number: int, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while piece := broker.recv(65536):
                client.sendall(piece)

    def stop(self) -> None:
        """Stop accepting, and wait until each connection is closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def no_garbage_is_collected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_is_collected")
@pytest.mark.parametrize("breaks", [(1,), range(2, 99), (0,)])
def test_a_broken_link_is_no_limit(tmp_path: Path, breaks: Container[int]) -> None:
    broker = Mosquitto(tmp_path)
    broker.start()
    link = _Link(broker.address.port, breaks)
    address = replace(broker.address, port=link.port)
    try:
        assert find_limit(address, "3.1.1", "edgefl:server:limits", "edgefl/v1/limits/a", 2000) is None
    finally:
        link.stop()
        broker.stop()
    whole = [sent for number, sent in enumerate(link.sent) if number not in breaks]
    assert all(sent.endswith(b"\xe0\x00") for sent in whole)
