"""Broker without passwords for one measurement on this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgefl.errors import BrokerError
from edgefl.lab.ports import free_port
from edgefl.system.processes import child_process
from edgefl.system.python import module_command
from edgefl_server.broker import mosquitto_command

_HOST = "127.0.0.1"


@contextlib.contextmanager
def lab_broker(folder: Path, within_s: float) -> Iterator[int]:
    """Run Mosquitto, or amqtt if it is not installed, and yield its port once it listens."""
    port = free_port(_HOST)
    command = module_command("edgefl", "broker", "--port", str(port), "--host", _HOST)
    with contextlib.suppress(BrokerError):  # it is not installed
        command = mosquitto_command(port, folder, _HOST)
    with child_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if not listens(port, process, within_s):
            raise BrokerError(f"no broker could be started on port {port}: name one that runs by `broker`")
        yield port


def listens(port: int, process: subprocess.Popen[Any], within_s: float) -> bool:
    """Wait until something accepts connections on ``port``; return False on timeout or if the process ends."""
    deadline = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 0.2):
            return True
        time.sleep(0.05)
    return False
