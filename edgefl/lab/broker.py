"""Free ports and a broker without passwords for measurements on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgefl.errors import BrokerError, ConfigError
from edgefl.system.processes import child_process, module_command
from edgefl_server.broker import mosquitto_command

# Below those that systems give to outgoing connections (Linux: from 32768, others: from 49152). One of those may be
# taken before its broker listens, even by a client that tries to reach the broker: it connects to itself then.
_PORTS = range(10_000, 32_000)
_TRIES = 1000


def free_port(host: str = "127.0.0.1", other: int = 0) -> int:
    """Return a TCP port on ``host`` without a listener.

    Args:
        host: local address to listen on.
        other: a port that is never returned, because the caller will listen on it; 0 for none.

    Raises:
        ConfigError: if no tried port is free.
    """
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        if port == other:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"none of {_TRIES} ports tried on {host} is free; name one: [broker] port = 1883", host=host
    )


_HOST = "127.0.0.1"


@contextlib.contextmanager
def lab_broker(folder: Path, within_s: float) -> Iterator[int]:
    """Run Mosquitto, or amqtt if it is not installed, during the ``with`` block. Yield its port once it listens.

    Args:
        folder: folder of the broker's files.
        within_s: seconds to wait for the broker.

    Raises:
        BrokerError: if it does not listen in time.
    """
    port = free_port(_HOST)
    command = module_command("edgefl", "broker", "--port", str(port), "--host", _HOST)
    with contextlib.suppress(BrokerError):  # it is not installed
        command = mosquitto_command(port, folder, _HOST)
    with child_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if not listens(port, process, within_s):
            raise BrokerError(f"no broker could be started on port {port}: name one that runs by `broker`")
        yield port


def listens(port: int, process: subprocess.Popen[Any], within_s: float) -> bool:
    """Wait up to ``within_s`` seconds until a server accepts connections on ``port``, and return True.

    Return False on timeout, or if ``process``, the server, ends before.
    """
    deadline = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 0.2):
            return True
        time.sleep(0.05)
    return False
