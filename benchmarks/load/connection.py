"""One device's connection to the broker, without a thread of its own."""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from benchmarks.load import packets
from edgefl.errors import ConfigError, ProtocolError

_READ_BYTES = 1 << 16
_SEND_BUFFER = 1 << 17
"""Send buffer of a socket: without a limit the kernel would hold a thousand updates of a megabyte."""
_MOST_BUFFERS = 64  # in one system call; Linux takes 1,024
_LAST_NUMBER = 65_535
_REFUSALS = (
    "",
    "the broker does not speak MQTT 3.1.1",
    "the broker refuses this client id",
    "the broker is unavailable",
    "wrong user name or password",
    "not authorized",
)

Buffer = bytes | memoryview
Sent = Callable[[], None]


class Owner(Protocol):
    """Owner of a connection, which receives its events."""

    def on_up(self) -> None: ...

    def on_message(self, topic: str, payload: bytes) -> None: ...

    def on_down(self, reason: str) -> None: ...


@dataclass(frozen=True)
class BrokerTarget:
    """Resolved address of the broker, as ``socket.connect`` expects it, and the user."""

    family: int
    address: tuple[Any, ...]
    username: str = ""
    password: str = ""


class Connection:
    """One TCP connection from dialling to its end; the owner creates another for the next attempt."""

    __slots__ = (
        "_events",
        "_flying",
        "_last",
        "_loop",
        "_out",
        "_owner",
        "_parser",
        "_socket",
        "idle",
        "open",
        "up",
    )

    def __init__(self, loop: Loop, target: BrokerTarget, owner: Owner, hello: bytes) -> None:
        self._loop = loop
        self._owner = owner
        self._parser = packets.Parser()
        self._out: deque[Buffer] = deque((hello,))
        self._flying: dict[int, Sent | None] = {}
        self._last = 0
        self.open = True
        self.up = False
        self.idle = False
        self._socket = socket.socket(target.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        code = self._socket.connect_ex(target.address)
        self._events = READ | WRITE
        loop.watch(self._socket, self._events, self._ready)
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            loop.later(0.0, lambda: self._end(os.strerror(code)))

    def publish(
        self,
        topic: str,
        payload: Sequence[Buffer],
        *,
        qos: int = 1,
        retain: bool = False,
        sent: Sent | None = None,
    ) -> None:
        """Queue a message. ``sent`` is called when the broker has it (QoS 1)."""
        number = self._number() if qos else 0
        if number:
            self._flying[number] = sent
        size = sum(map(len, payload))
        self._out.append(packets.publish_head(topic, size, number=number, retain=retain))
        self._out.extend(payload)
        self._flush()

    def subscribe(self, topics: Sequence[str], qos: int) -> None:
        """Queue a SUBSCRIBE packet."""
        self._write(packets.subscribe(self._number(), topics, qos))

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Queue an UNSUBSCRIBE packet."""
        self._write(packets.unsubscribe(self._number(), topics))

    def ping(self) -> None:
        """Send PINGREQ, unless something was sent since the last call."""
        if self.idle:
            self._write(packets.PING)
        self.idle = True

    def goodbye(self) -> None:
        """Send the queue and DISCONNECT, so that the broker does not publish the will."""
        self._out.append(packets.GOODBYE)
        self._flush()
        if self.open:
            self._socket.setblocking(True)
            self._socket.settimeout(1.0)
            self._flush()
        self.close()

    def close(self) -> None:
        """Close without DISCONNECT: the broker publishes the will. The owner receives no event."""
        if self.open:
            self.open = self.up = False
            self._loop.forget(self._socket)
            self._socket.close()
            self._out.clear()

    @property
    def waiting(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._flying)

    def _number(self) -> int:
        """Return the next free packet identifier."""
        while True:
            self._last = self._last % _LAST_NUMBER + 1
            if self._last not in self._flying:
                return self._last

    def _write(self, packet: bytes) -> None:
        self._out.append(packet)
        self._flush()

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and self.open:
            self._take()

    def _flush(self) -> None:
        """Send as much as the socket accepts."""
        out = self._out
        try:
            while out:
                sent = self._socket.sendmsg(list(islice(out, _MOST_BUFFERS)))
                self.idle = False
                while sent:
                    first = out.popleft()
                    if sent < len(first):
                        out.appendleft(memoryview(first)[sent:])
                        break
                    sent -= len(first)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EINPROGRESS):  # it is still dialling
                self._end(error.strerror or str(error))
            return
        wanted = READ | WRITE if out else READ
        if wanted != self._events and self.open:
            self._events = wanted
            self._loop.change(self._socket, wanted, self._ready)

    def _take(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if not data:
            self._end("the broker hung up")
            return
        try:
            for packet in self._parser.feed(data):
                self._handle(packet)
                if not self.open:
                    return
        except ProtocolError as error:
            self._end(error.message)
            return
        if self._out:
            self._flush()

    def _handle(self, packet: packets.Packet) -> None:
        if packet.kind == packets.PUBLISH:
            if packet.qos:
                self._out.append(packets.puback(packet.number))
            self._owner.on_message(packet.topic, packet.payload)
        elif packet.kind == packets.PUBACK:
            sent = self._flying.pop(packet.number, None)
            if sent is not None:
                sent()
        elif packet.kind == packets.CONNACK:
            if packet.number:
                known = packet.number < len(_REFUSALS)
                self._end(_REFUSALS[packet.number] if known else f"refused with code {packet.number}")
                return
            self.up = True
            self._owner.on_up()

    def _end(self, reason: str) -> None:
        if self.open:
            self.close()
            self._owner.on_down(reason)


READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_WAIT_S = 1.0


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Timer:
    """Scheduled call. :meth:`cancel` may be called several times."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call."""
        self.call = None


class Loop:
    """Event loop of sockets and timers, on the monotonic clock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False

    def watch(self, file: HasFileno, events: int, ready: Callable[[int], None]) -> None:
        self._selector.register(file, events, ready)

    def change(self, file: HasFileno, events: int, ready: Callable[[int], None]) -> None:
        self._selector.modify(file, events, ready)

    def forget(self, file: HasFileno) -> None:
        self._selector.unregister(file)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def run(self) -> None:
        """Run until :meth:`stop`."""
        self._running = True
        while self._running:
            for key, events in self._selector.select(self._ring()):
                key.data(events)

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        self._selector.close()

    def _ring(self) -> float:
        """Call the due timers; return the seconds until the next one."""
        timers, now = self._timers, time.monotonic()
        while timers and (timers[0][0] <= now or timers[0][2].call is None):
            call = heapq.heappop(timers)[2].call
            if call is not None:
                call()
        if not self._running:
            return 0.0
        return min(_LONGEST_WAIT_S, max(0.0, timers[0][0] - time.monotonic())) if timers else _LONGEST_WAIT_S


_OTHERS = 128
"""Files besides the connections: libraries, pipes, a measurement's inputs."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_room(connections: int) -> None:
    """Raise this process's limit on open files as far as ``connections`` connections need it.

    Raises:
        ConfigError: if the system's limits are too low, with the remedy.
    """
    needed = connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{connections} connections need {needed} open files, and this process may have {hard}: raise the limit "
            f"(`ulimit -Hn {needed}` as root, LimitNOFILE in a systemd unit), or load with fewer devices",
            needed=needed,
            limit=hard,
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    ports = _local_ports()
    if ports and connections > ports:
        raise ConfigError(
            f"{connections} connections from one address need as many ports, and this system gives {ports} "
            f"({_PORT_RANGE}): widen that range, or load from several machines, each with another `first`",
            limit=ports,
        )


def _local_ports() -> int:
    """Return the possible number of outgoing connections to one listener; 0 if unknown."""
    try:
        first, last = _PORT_RANGE.read_text(encoding="ascii").split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return 0
