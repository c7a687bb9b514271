"""Web servers with few descriptors, beside more idle connections than they have: honest requests are answered."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from edgefl.system.listener import _OnceAMinute
from edgefl_server.access.certificates import LabAuthority

DESCRIPTORS = 200
IDLE = 230
PATIENCE_S = 60.0
MQTT = (
    b"GET /mqtt HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)
CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x14\x00\x01a"
CONNACK = b"\x20\x02\x00\x00"
ATTACKS = {
    "nothing": b"",
    "half-headers": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "half-body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
    "one-answer-and-half": b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n",
    "unread-answer": b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
    "unread-last-answer": b"GET /whole HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "read-last-answer": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "no-http": b"\x00\r\n\r\n",
    "websocket-elsewhere": MQTT.replace(b"/mqtt", b"/none"),
    "websocket": MQTT,
    "half-connect": MQTT + b"\x82\x85" + bytes(4) + CONNECT[:5],
    "whole-connect": MQTT + bytes([0x82, 0x80 | len(CONNECT)]) + bytes(4) + CONNECT,
}


class Broker:
    """Greets each client that says CONNECT."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        held = []
        while True:
            try:
                held.append(self._listener.accept()[0])
            except OSError:
                return
            if held[-1].recv(1000) == CONNECT:
                held[-1].sendall(CONNACK)

    def stop(self) -> None:
        self._listener.close()


@contextmanager
def served(log: Path, *certificate: str) -> Iterator[int]:
    """The port of a server in a process of its own."""
    broker = Broker()
    command = [
        sys.executable,
        "-m",
        "tests.system.listening",
        str(DESCRIPTORS),
        str(broker.port),
        *certificate,
    ]
    with log.open("wb") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()
            broker.stop()


def ask(port: int, context: ssl.SSLContext | None = None) -> bytes:
    """The answer to an honest request."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    )
    connection.request("GET", "/")
    answer = connection.getresponse().read()
    connection.close()
    return answer


def hold(stack: ExitStack, port: int, sent: bytes) -> None:
    for _ in range(IDLE):
        idle = stack.enter_context(socket.socket())
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.settimeout(PATIENCE_S)
        idle.connect(("127.0.0.1", port))
        with suppress(OSError):  # it made room already
            idle.sendall(sent)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listener") / "log"


@pytest.fixture(scope="module")
def port(log: Path) -> Iterator[int]:
    with served(log) as port:
        yield port


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_honest_request_is_answered_beside_idle_ones(attack: str, port: int, log: Path) -> None:
    with ExitStack() as stack:
        hold(stack, port, ATTACKS[attack])
        for _ in range(3):
            assert ask(port) == b"here"
    assert log.stat().st_size < 10_000


def test_an_honest_browser_reaches_the_broker_and_stays_beside_idle_ones(port: int) -> None:
    with ExitStack() as stack:
        hold(stack, port, MQTT)
        browser = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        browser.sendall(MQTT)
        file = browser.makefile("rb")
        assert file.readline().startswith(b"HTTP/1.1 101")
        while file.readline().strip():
            pass
        for piece in (CONNECT[:4], CONNECT[4:]):
            browser.sendall(b"\x82" + bytes([0x80 | len(piece)]) + bytes(4) + piece)
        assert file.read(6) == b"\x82\x04" + CONNACK
        hold(stack, port, b"")
        assert ask(port) == b"here"
        browser.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing came, not even its end
            browser.recv(1)
        file.close()


def test_a_server_that_answers_as_many_as_it_can_logs_one_line(tmp_path: Path) -> None:
    with served(tmp_path / "log") as port:
        with ExitStack() as stack:
            hold(stack, port, b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
            while not (tmp_path / "log").stat().st_size:
                time.sleep(0.02)
        assert ask(port) == b"here"
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1
    assert "each of 36 is being answered" in lines[0]


def test_the_same_holds_where_no_handshake_of_tls_comes(tmp_path: Path) -> None:
    authority = LabAuthority(tmp_path / "ca")
    issued = authority.broker("127.0.0.1")
    context = ssl.create_default_context(cafile=str(authority.own.certificate))
    with served(tmp_path / "log", str(issued.certificate), str(issued.key)) as port, ExitStack() as stack:
        hold(stack, port, b"")
        assert ask(port, context) == b"here"


def test_a_server_that_stops_early_logs_no_traceback() -> None:
    """asyncio's handler of exceptions has the callback in its message."""
    loop, errors = asyncio.new_event_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    closed = socket.socket()
    closed.close()
    loop.call_soon(loop._start_serving, None, closed)  # type: ignore[attr-defined]
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    (context,) = errors
    error = context["exception"]
    record = logging.LogRecord(
        "asyncio", 40, "", 0, context["message"], (), (type(error), error, error.__traceback__)
    )

    assert isinstance(error, ValueError) and not _OnceAMinute().filter(record)


def test_a_message_is_logged_once_a_minute_whatever_it_is_about() -> None:
    limited, logged = _OnceAMinute(), 0
    for second in range(120):
        for each in range(9):
            record = logging.LogRecord("asyncio", 40, "", 0, "no room for %s", (each,), None)
            record.created = float(second)
            logged += limited.filter(record)
    assert logged == 2


def test_no_page_opens_a_listener_in_another_way() -> None:
    root = Path(__file__).resolve().parents[2]
    users = [
        str(path.relative_to(root))
        for room in ("edgefl", "server", "device_runtime")
        for path in (root / room).rglob("*.py")
        if "import uvicorn" in path.read_text()
    ]
    assert users == ["edgefl/system/listener.py"]
