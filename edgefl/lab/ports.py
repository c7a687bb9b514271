"""Ports for brokers on this machine."""

from __future__ import annotations

import random
import resource
import socket
from pathlib import Path

from edgefl.errors import ConfigError

# Below those that systems give to outgoing connections (Linux: from 32768, others: from 49152). One of those may be
# taken before its broker listens, even by a client that tries to reach the broker: it connects to itself then.
_PORTS = range(10_000, 32_000)
_TRIES = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now. ConfigError if there is none."""
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"none of {_TRIES} ports tried on {host} is free; name one: [broker] port = 1883", host=host
    )


_OTHERS = 128
"""Files beside the connections: libraries, pipes, what a measurement reads."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_room(connections: int) -> None:
    """Raise the limit on open files as far as it is needed; ConfigError says how where that is not allowed."""
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
    """How many outgoing connections to one listener there can be; 0: unknown."""
    try:
        first, last = _PORT_RANGE.read_text(encoding="ascii").split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return 0
