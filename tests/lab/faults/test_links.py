"""Links that are bad on purpose, with an echo at their other end."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from edgefl.lab.faults.links import Links
from edgefl.lab.faults.schedule import Fault

PUBLISH = b"\x32\x07\x00\x03a/b\x00\x01"
WAIT_S = 300.0


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)
        self.server.gone.set()  # type: ignore[attr-defined]


@pytest.fixture
def echo() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        server.gone = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def links(echo: socketserver.ThreadingTCPServer) -> Iterator[Links]:
    made = Links(("one", "other"), ("127.0.0.1", echo.server_address[1]), seed=1)
    yield made
    made.stop()


def connected(links: Links, name: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", links.ports[name]), timeout=WAIT_S)
    assert answered(client) == PUBLISH
    return client


def answered(client: socket.socket, size: int = len(PUBLISH)) -> bytes:
    client.sendall(PUBLISH)
    found = b""
    while len(found) < size:
        found += client.recv(size - len(found))
    return found


def test_a_delay_holds_packets_back_and_ends(links: Links) -> None:
    fault = Fault(kind="delay", amount=0.2)
    with connected(links, "one") as client, connected(links, "other") as other:
        links.begin(["one"], fault)
        began = time.monotonic()
        assert answered(other) == PUBLISH
        assert answered(client) == PUBLISH
        assert time.monotonic() - began >= 0.4, "both ways"
        links.end(["one"], fault)
        assert answered(client) == PUBLISH


def test_a_stalled_link_lets_nothing_through_until_it_ends(links: Links) -> None:
    fault = Fault(kind="stall")
    with connected(links, "one") as client:
        links.begin(["one"], fault)
        client.sendall(PUBLISH)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        links.end(["one"], fault)
        client.settimeout(WAIT_S)
        assert client.recv(len(PUBLISH)) == PUBLISH


def test_a_reset_cuts_the_connections_of_its_link_only(links: Links) -> None:
    with connected(links, "one") as client, connected(links, "other") as other:
        links.begin(["one"], Fault(kind="reset"))
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert answered(other) == PUBLISH
    with connected(links, "one"):
        pass


def test_a_half_open_connection_stays_open(links: Links, echo: socketserver.ThreadingTCPServer) -> None:
    fault = Fault(kind="half_open")
    with connected(links, "one") as client:
        links.begin(["one"], fault)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert not echo.gone.wait(0.2)  # type: ignore[attr-defined]
        with connected(links, "one"):
            pass
        links.end(["one"], fault)
        assert echo.gone.wait(WAIT_S)  # type: ignore[attr-defined]


def test_a_publish_comes_twice_and_says_that_it_is_a_copy(links: Links) -> None:
    with connected(links, "one") as client:
        links.begin(["one"], Fault(kind="duplicate", amount=1.0))
        copy = b"\x3a" + PUBLISH[1:]
        found = answered(client, 4 * len(PUBLISH))

    assert found == PUBLISH + copy + copy + copy, "each way doubles what comes"
