"""Workers as processes of this machine, each at the other end of a pipe. They end with the server, however it ends.

Such a process runs ``python -m edgefl_server.shards.process DESCRIPTOR``.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from edgefl.errors import StoreError
from edgefl.system.processes import start_module
from edgefl.wire.mqtt.events import EventSink
from edgefl_server.shards.messages import Command, Died, Stop, WorkerMessage, WorkerSettings
from edgefl_server.shards.worker import AggregationWorker

_STOP_S = 5.0
"""Seconds for a worker to leave the broker. What it has not journaled is sent again by the devices."""

SEND_S = 30.0
"""Seconds for a worker to read a command: one that hangs must not block its server."""


class WorkerProcess(Protocol):
    """Process that runs :func:`main`, with the interface of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ProcessLauncher:
    """Factory of workers that are processes of this machine.

    Args:
        send_s: Seconds after which a worker is killed that reads nothing.
    """

    def __init__(self, send_s: float = SEND_S) -> None:
        self._send_s = send_s

    def launch(self, settings: WorkerSettings, sink: EventSink[WorkerMessage]) -> ProcessWorkerHandle:
        """Start a worker. Raises StoreError if the machine has no room for a process."""
        here: socket.socket | None = None
        try:
            here, there = socket.socketpair()
            with there:
                process = self.start(there)
        except OSError as error:
            if here is not None:
                here.close()
            raise StoreError(
                f"no worker can be started: {error.strerror or error}; set server.workers lower, or raise what the machine "
                "allows of processes, memory and open files (`ulimit -a`)"
            ) from error
        return ProcessWorkerHandle(process, here, settings, sink, self._send_s)

    def start(self, there: socket.socket) -> WorkerProcess:
        """Start a Python with the worker's end of the pipe. It ignores Ctrl-C, which is for the server: that ends it."""
        return start_module("edgefl_server.shards.process", there)


class ProcessWorkerHandle:
    """Server's end of one worker process.

    Args:
        process: Process of the worker.
        here: Server's end of the pipe.
        settings: Settings of the worker.
        sink: Receives the worker's messages, on a thread; :class:`Died` is the last one.
        send_s: Seconds after which a worker is killed that reads nothing.
    """

    def __init__(
        self,
        process: WorkerProcess,
        here: socket.socket,
        settings: WorkerSettings,
        sink: EventSink[WorkerMessage],
        send_s: float = SEND_S,
    ) -> None:
        self._process = process
        seconds, microseconds = divmod(round(send_s * 1_000_000), 1_000_000)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, microseconds))
        self._connection = Connection(here.detach())
        self._sink = sink
        self._sending = threading.Lock()
        self._send(settings)
        threading.Thread(target=self._receive, name=f"worker-{settings.worker}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. A worker that is gone receives nothing; its :class:`Died` message reports that."""
        self._send(command)

    def kill(self) -> None:
        """End the worker at once. Updates that it did not journal are lost."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop the worker, and wait until it has left the broker."""
        self._send(Stop())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def _send(self, message: WorkerSettings | Command) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError:  # it is gone or hangs; after a part of a message the pipe cannot be used any more
                self._process.kill()

    def _receive(self) -> None:
        try:
            while True:
                self._sink.put(self._connection.recv())
        except (EOFError, OSError):
            code = self._process.wait()
            self._sink.put(
                Died(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
            )


class _PipeSink:
    """Sink that sends a worker's messages to the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, message: WorkerMessage, /) -> None:
        with suppress(OSError):  # the server is gone, which the other thread notices
            self._connection.send(message)


def _listen(connection: Connection, worker: AggregationWorker) -> None:
    """Pass the server's commands to the worker, and end the process soon after the server."""
    try:
        while True:
            worker.send(connection.recv())
    except (EOFError, OSError):
        worker.send(Stop())
        time.sleep(_STOP_S)
        os._exit(0)


def main(descriptor: int) -> None:
    """Run a worker at the worker's end of the pipe, which is the file ``descriptor``."""
    connection = Connection(descriptor)
    worker = AggregationWorker(connection.recv(), _PipeSink(connection))
    threading.Thread(target=_listen, args=(connection, worker), daemon=True).start()
    with suppress(StoreError):  # reported before, at each retry
        worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
