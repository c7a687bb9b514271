"""TCP relays between processes and the broker, with faults: delays, low bandwidth, duplicates, cut connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl.lab.faults.schedule import Fault

_READ_BYTES = 1 << 16
_WAITING_PACKETS = 64
_NO_LINGER = struct.pack("ii", 1, 0)  # a close that sends RST
_START_S = 10.0


@dataclass
class _LinkFaults:
    """Active faults of a link.

    Attributes:
        delay_s: delay of each packet in seconds.
        jitter_s: largest random delay in addition.
        bytes_per_s: bandwidth; 0 for no limit.
        twice: share of PUBLISH packets that are sent twice.
        stalled: number of active faults that block all packets.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    twice: float = 0.0
    stalled: int = 0


@dataclass(eq=False)
class _RelayedConnection:
    """Connection of a client to a relay, with the relay's connection to the broker for this client."""

    client: asyncio.StreamWriter
    broker: asyncio.StreamWriter
    half_open: bool = False

    def cut(self) -> None:
        _reset(self.client)
        _reset(self.broker)


@dataclass
class _BrokerLink:
    name: str
    rng: random.Random
    state: _LinkFaults = field(default_factory=_LinkFaults)
    connections: set[_RelayedConnection] = field(default_factory=set)
    clear: asyncio.Event = field(default_factory=asyncio.Event)


class LinkRelays:
    """TCP relays to the broker, with one listening port for each named process; ``ports`` holds the port by name.

    All work happens on the event loop of one thread. :meth:`begin` and :meth:`end` may be called from any thread.
    """

    def __init__(
        self,
        names: Iterable[str],
        broker: tuple[str, int],
        seed: int,
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        """Start the relays.

        Args:
            names: names of the processes.
            broker: host and port of the broker.
            seed: seed of random faults.
            elsewhere: ports of the broker for processes that use another one.
        """
        self._broker = broker
        self._elsewhere = elsewhere or {}
        self._loop = asyncio.new_event_loop()
        self._links = {name: _BrokerLink(name, random.Random(f"{seed}/{name}")) for name in names}
        for link in self._links.values():
            link.clear.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self.ports: Mapping[str, int] = self._wait_for(self._listen())

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _listen(self) -> dict[str, int]:
        ports = {}
        for name, link in self._links.items():
            server = await asyncio.start_server(self._acceptor(link), "127.0.0.1", 0)
            ports[name] = server.sockets[0].getsockname()[1]
        return ports

    def stop(self) -> None:
        """Cut all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_START_S)

    def _end(self) -> None:
        for link in self._links.values():
            for connection in list(link.connections):
                connection.cut()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    # -- faults ----------------------------------------------------------------------------------------------

    def later(self, seconds: float, work: Callable[..., None], *arguments: object) -> None:
        """Call ``work(*arguments)`` on the thread of the links after ``seconds``, unless the links are stopped before."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, work, *arguments)

    def begin(self, names: Iterable[str], fault: Fault) -> None:
        """Apply ``fault`` to the links of the processes ``names``. Unknown names are ignored."""
        self._change(names, lambda link: _begin(link, fault))

    def end(self, names: Iterable[str], fault: Fault) -> None:
        """End the effects of ``fault`` on the links of the processes ``names``. Closed connections stay closed."""
        self._change(names, lambda link: _end(link, fault))

    def _change(self, names: Iterable[str], change: Callable[[_BrokerLink], None]) -> None:
        for name in names:
            if name in self._links:
                self._loop.call_soon_threadsafe(change, self._links[name])

    # -- connections -----------------------------------------------------------------------------------------

    def _acceptor(
        self, link: _BrokerLink
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await link.clear.wait()
            try:
                host, port = self._broker
                back, forth = await asyncio.open_connection(host, self._elsewhere.get(link.name, port))
            except OSError:
                _reset(writer)
                return
            connection = _RelayedConnection(writer, forth)
            link.connections.add(connection)
            ways = _pump(link, reader, forth), _pump(link, back, writer)
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while connection.half_open:
                await asyncio.sleep(0.01)
            link.connections.discard(connection)
            for task in tasks:
                task.cancel()
            for end in (writer, forth):
                end.close()

        return accept


async def _pump(link: _BrokerLink, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Relay packets from ``reader`` to ``writer`` in order, each after its delay, until one end closes."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING_PACKETS)
    sender = asyncio.ensure_future(_send(link, waiting, writer))
    packets, due = PacketSplitter(), 0.0
    now = asyncio.get_running_loop().time
    try:
        while data := await reader.read(_READ_BYTES):
            for packet in packets.feed(data):
                state = link.state
                due = max(due, now() + state.delay_s + link.rng.uniform(0.0, state.jitter_s))
                await waiting.put((due, packet))
                copy = second_copy(packet) if state.twice and link.rng.random() < state.twice else None
                if copy is not None:
                    await waiting.put((due, copy))
        await waiting.put((due, b""))
        await sender
    except OSError:
        return
    finally:
        sender.cancel()


async def _send(
    link: _BrokerLink, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
) -> None:
    now = asyncio.get_running_loop().time
    with contextlib.suppress(OSError):
        while True:
            due, packet = await waiting.get()
            if not packet:
                return
            await asyncio.sleep(max(0.0, due - now()))
            await link.clear.wait()
            writer.write(packet)
            await writer.drain()
            if link.state.bytes_per_s > 0:
                await asyncio.sleep(len(packet) / link.state.bytes_per_s)


def _begin(link: _BrokerLink, fault: Fault) -> None:
    state = link.state
    match fault.kind:
        case "delay":
            state.delay_s += fault.amount
        case "reorder":
            state.jitter_s += fault.amount
        case "bandwidth":
            state.bytes_per_s = fault.amount
        case "duplicate":
            state.twice = fault.amount
        case "stall":
            state.stalled += 1
            link.clear.clear()
        case "reset":
            for connection in list(link.connections):
                connection.cut()
        case "half_open":
            for connection in list(link.connections):
                connection.half_open = True
                _reset(connection.client)


def _end(link: _BrokerLink, fault: Fault) -> None:
    state = link.state
    match fault.kind:
        case "delay":
            state.delay_s = max(0.0, state.delay_s - fault.amount)
        case "reorder":
            state.jitter_s = max(0.0, state.jitter_s - fault.amount)
        case "bandwidth":
            state.bytes_per_s = 0.0
        case "duplicate":
            state.twice = 0.0
        case "stall":
            state.stalled -= 1
            if state.stalled == 0:
                link.clear.set()
        case "half_open":
            for connection in list(link.connections):
                connection.half_open = False


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection by RST, which loses the bytes in flight."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


_PUBLISH, _DUP, _QOS = 0x30, 0x08, 0x06
_LENGTH_BYTES = 4
_WEBSOCKET = b"GET ", b"HTTP"
"""First bytes of both sides of MQTT over WebSocket; as MQTT they would have the reserved flags 7 or 8."""


class PacketSplitter:
    """Splitter of a byte stream into MQTT packets. Other protocols, such as TLS or WebSocket, pass unchanged."""

    def __init__(self) -> None:
        self._held = b""
        self._opaque = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data`` to the stream, and return the complete packets. If the stream is not MQTT, return the bytes as
        one packet.
        """
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
    """Return the size of the first packet in bytes; None if its header is incomplete, 0 if ``data`` are no packet."""
    if data[:1] and not 0x10 <= data[0] <= 0xF0:
        return 0
    length = 0
    for at, byte in enumerate(data[1 : 1 + _LENGTH_BYTES]):
        length |= (byte & 0x7F) << (7 * at)
        if not byte & 0x80:
            return 2 + at + length
    return 0 if len(data) > _LENGTH_BYTES else None


def second_copy(packet: bytes) -> bytes | None:
    """Return a duplicate of a PUBLISH packet, with the DUP flag if its QoS is above 0; None for any other packet."""
    if packet[0] & 0xF0 != _PUBLISH:
        return None
    return bytes([packet[0] | (_DUP if packet[0] & _QOS else 0)]) + packet[1:]
