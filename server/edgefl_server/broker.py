"""Mosquitto: its configuration, and a supervisor that restarts it when its memory is full.

At its ``memory_limit`` Mosquitto refuses every message and every client, including the server that could delete
messages, and does not recover. It stores nothing on disk, so a new process begins empty. Server and devices then
reconnect and publish their retained messages again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgefl.errors import BrokerError
from edgefl.system.files import write_text
from edgefl.system.memory import most_bytes, status_bytes
from edgefl.system.processes import child_process
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address

_LIMITS = Limits()
_LEAST_MEMORY = 256 << 20
_LARGEST_PACKET = 268_435_455  # of MQTT
_LOOK_S = 0.5
_FULL = 0.9
"""Share of the memory limit at which the broker is restarted, because messages may not fit any more."""
_PR_SET_PDEATHSIG = 1


def mosquitto_command(
    port: int,
    folder: Path,
    host: str = "127.0.0.1",
    websocket_port: int = 0,
    limits: Limits = _LIMITS,
    memory_bytes: int = 0,
) -> list[str]:
    """Write Mosquitto's configuration to ``folder`` and return the command that runs it.

    Args:
        port: TCP port.
        folder: Folder of the configuration.
        host: Address to listen on; it must be a loopback address.
        websocket_port: Port of MQTT over WebSocket; 0 for none.
        limits: Limits of the federation, which set the largest packet.
        memory_bytes: Memory for messages; 0 for a quarter of the machine's.

    Raises:
        BrokerError: If Mosquitto is not installed, ``host`` is not loopback, or a port is in use.
    """
    check_private(host)
    program = mosquitto_program()
    check_ports(host, port, websocket_port)
    lines = ["allow_anonymous true", *mosquitto_base(limits, memory_bytes), f"listener {port} {host}"]
    if websocket_port:
        lines += [f"listener {websocket_port} {host}", "protocol websockets"]
    config = folder / "mosquitto.conf"
    write_text(config, "\n".join(lines) + "\n")
    return [program, "-c", str(config)]


def check_ports(host: str, port: int, websocket_port: int) -> list[int]:
    """Check that a broker can listen on these ports, and return them; 0 for ``websocket_port`` is left out.

    Raises:
        BrokerError: If a port cannot be bound, or both are the same.
    """
    if websocket_port and websocket_port == port:
        raise BrokerError(
            f"port {port} is used twice: MQTT over WebSocket (`websocket_port`) has a port of its own",
            port=port,
        )
    ports = [port, websocket_port] if websocket_port else [port]
    for each in ports:
        check_port(host, each)
    return ports


def mosquitto_program() -> str:
    """Return the path of the Mosquitto program.

    Raises:
        BrokerError: If Mosquitto is not installed.
    """
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise BrokerError(
            "mosquitto is not installed: install it (Debian: apt-get install mosquitto), or use the embedded "
            "broker with `kind` amqtt"
        )
    return program


def message_bytes(memory_bytes: int = 0) -> int:
    """Return the memory in bytes that a broker may use for messages.

    It is ``memory_bytes``, or a quarter of the machine's memory (at least 256 MiB) if ``memory_bytes`` is 0.
    """
    return memory_bytes or max(_LEAST_MEMORY, most_bytes() // 4)


MOST_QUEUED = 500_000
"""Largest number of messages queued at the broker for one client: enough for the messages of tens of thousands of
devices that connect."""


def mosquitto_base(limits: Limits = _LIMITS, memory_bytes: int = 0) -> list[str]:
    """Return the configuration lines that every Mosquitto started by edgefl has in common.

    Args:
        limits: Limits of the federation. A packet may be four times the largest message, for the fields around
            its data.
        memory_bytes: Memory for messages; 0 for a quarter of the machine's.
    """
    packet = 4 * max(limits.chunk_bytes, limits.announcement_bytes)
    lines = [
        f"max_packet_size {min(packet, _LARGEST_PACKET)}",
        f"memory_limit {message_bytes(memory_bytes)}",
        "persistence false",
        "set_tcp_nodelay true",
        "max_inflight_messages 64",
        # Of one client, the server: Mosquitto drops what is beyond its 1,000, and a fleet of that size says as much at once.
        f"max_queued_messages {MOST_QUEUED}",
    ]
    if (
        sys.platform != "win32" and os.geteuid() == 0
    ):  # otherwise it becomes the user mosquitto, who cannot read our folder
        lines.append("user root")
    return lines


def check_private(host: str) -> None:
    """Check that ``host`` is a loopback address, because a broker without passwords must not be reachable from
    outside.

    Raises:
        BrokerError: If ``host`` is another address.
    """
    if not Address(host).is_loopback:
        raise BrokerError(
            f"a broker without passwords listens to its own machine only, found host {host!r}: others come with TLS and "
            "passwords (`edgefl broker --tls`)",
            host=host,
        )


def check_port(host: str, port: int) -> None:
    """Check that a socket can be bound to ``host:port`` now.

    Raises:
        BrokerError: If the port is in use, or the address cannot be used.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            hint = "stop what uses it, or choose another port" if in_use else "choose another address or port"
            reason = "is in use" if in_use else f"cannot be used ({error.strerror})"
            raise BrokerError(f"port {port} on {host} {reason}: {hint}", host=host, port=port) from error


def run_mosquitto(command: Sequence[str], memory_bytes: int = 0) -> int:
    """Run Mosquitto, restart it when its memory is full, and return its exit code when it ends otherwise.

    SIGTERM and SIGINT stop Mosquitto and this process.

    Args:
        command: Result of :func:`mosquitto_command`.
        memory_bytes: The same as in its configuration, 0 for a quarter of the machine's memory.
    """
    most = message_bytes(memory_bytes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    end_with_us = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    while True:
        with child_process(
            command, preexec_fn=lambda: end_with_us(_PR_SET_PDEATHSIG, signal.SIGTERM)
        ) as process:
            while status_bytes("RssAnon", process.pid) < _FULL * most:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_S)
        print(
            f"the broker's memory is full of messages ({most >> 20} MiB): it starts again without them. If that repeats, "
            "find the client that leaves retained messages, or give it more (`--memory`)",
            file=sys.stderr,
            flush=True,
        )
