"""Relay between an agent and the broker: reads the agent's packets, cuts the connection, and holds back bytes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from edgefl_conformance.play.packets import Packet, PacketReader, Subscribe

_READ_BYTES = 1 << 14


class PacketRelay:
    """Relay of one agent's connections on a port of its own. ``reads``: False if they are not bare MQTT (WebSocket)."""

    def __init__(self, broker_port: int, *, reads: bool = True) -> None:
        self._broker_port = broker_port
        self.reads = reads
        self._lock = threading.Lock()
        self._packets: list[tuple[float, Packet]] = []
        self._sockets: set[socket.socket] = set()
        self._room: int | None = None
        self._open = True
        self._flow = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def packets(self, since: float = 0.0) -> list[Packet]:
        """Return the packets of interest that the agent sent since that moment of the monotonic clock."""
        with self._lock:
            return [packet for when, packet in self._packets if when >= since]

    def subscriptions(self, since: float = 0.0) -> list[Subscribe]:
        """Return the filters that the agent subscribed to since that moment of the monotonic clock."""
        return [packet for packet in self.packets(since) if isinstance(packet, Subscribe)]

    def cut(self) -> None:
        """Break every connection without DISCONNECT."""
        with self._lock:
            sockets = list(self._sockets)
        self._end(*sockets)

    def close_door(self) -> None:
        """Break connections, and refuse new ones until :meth:`open_door`."""
        self._open = False
        self.cut()

    def open_door(self) -> None:
        """Accept connections again."""
        self._open = True

    def hold_after(self, nbytes: int) -> None:
        """Let so many more bytes of the agent pass, and hold the rest back."""
        with self._flow:
            self._room = nbytes

    def release(self) -> None:
        """Let the held bytes pass."""
        with self._flow:
            self._room = None
            self._flow.notify_all()

    def close(self) -> None:
        """Close the port and all connections."""
        self._open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone does not
        with suppress(OSError):
            self._listener.close()
        self.release()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            broker = self._to_broker() if self._open else None
            if broker is None:
                client.close()
                continue
            for sock in (client, broker):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, broker}
            threading.Thread(target=self._up, args=(client, broker), daemon=True).start()
            threading.Thread(target=self._down, args=(broker, client), daemon=True).start()

    def _to_broker(self) -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", self._broker_port))
        except OSError:
            return None

    def _up(self, client: socket.socket, broker: socket.socket) -> None:
        reader = PacketReader()
        with suppress(OSError):
            while data := client.recv(_READ_BYTES):
                self._note(reader, data)
                while data:
                    part = data[: self._passes(len(data))]
                    broker.sendall(part)
                    data = data[len(part) :]
        self._end(client, broker)

    def _passes(self, wanted: int) -> int:
        """Return how many of ``wanted`` bytes may pass now; waits for the first."""
        with self._flow:
            while self._room is not None and self._room <= 0:
                self._flow.wait()
            if self._room is None:
                return wanted
            taken = min(wanted, self._room)
            self._room -= taken
            return taken

    def _down(self, broker: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := broker.recv(_READ_BYTES):
                client.sendall(data)
        self._end(client, broker)

    def _note(self, reader: PacketReader, data: bytes) -> None:
        if not self.reads:
            return
        found = reader.feed(data)
        if found:
            now = time.monotonic()
            with self._lock:
                self._packets += [(now, packet) for packet in found]

    def _end(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            with self._lock:
                self._sockets.discard(sock)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads; closing alone does not
            with suppress(OSError):
                sock.close()
