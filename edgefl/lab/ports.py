"""Ports for brokers on this machine."""

from __future__ import annotations

import random
import socket

from edgefl.wire.errors import ConfigError

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
