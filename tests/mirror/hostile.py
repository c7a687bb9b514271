"""A mirror that does what the test says: a real listening socket, and bytes of the test's own."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

PATIENCE_S = 60.0


class Talk:
    """One request on one connection, and what is sent back."""

    def __init__(self, connection: socket.socket, head: str, ended: threading.Event) -> None:
        self._connection = connection
        self.head = head
        self.ended = ended
        self.path = head.split(" ", 2)[1] if " " in head else ""
        found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", head)
        self.part = (int(found[1]), int(found[2]) + 1) if found else None

    def send(self, data: bytes | str) -> None:
        self._connection.sendall(data.encode() if isinstance(data, str) else data)

    def good(self, data: bytes) -> None:
        """As a mirror should."""
        first, last = self.part or (0, len(data))
        status = "206 Partial Content" if self.part else "200 OK"
        told = f"Content-Range: bytes {first}-{last - 1}/{len(data)}\r\n" if self.part else ""
        self.send(f"HTTP/1.1 {status}\r\nContent-Length: {last - first}\r\n{told}\r\n")
        self.send(data[first:last])


Behaviour = Callable[[Talk], None]


class ScriptedMirror:
    """``behave`` answers each request; the connection is closed after it unless it is ``kept``."""

    def __init__(self, behave: Behaviour, *, kept: bool = False) -> None:
        self._behave = behave
        self._kept = kept
        self._ended = threading.Event()
        self.asked: list[Talk] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> ScriptedMirror:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(PATIENCE_S)
            head = b""
            while True:
                while b"\r\n\r\n" not in head:
                    data = connection.recv(4096)
                    if not data:
                        return
                    head += data
                text, _, head = head.partition(b"\r\n\r\n")
                talk = Talk(connection, text.decode("latin-1"), self._ended)
                self.asked.append(talk)
                self._behave(talk)
                if not self._kept:
                    return
