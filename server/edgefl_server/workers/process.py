"""Workers as processes of this machine, connected by pipes. They end with the process that started them.

Each runs ``python -m edgefl_server.workers.process DESCRIPTOR``.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

from edgefl.errors import StoreError, not_on_windows
from edgefl.system.processes import start_module
from edgefl.wire.mqtt.events import EventSink
from edgefl_server.workers.protocol import Died, LoopSettings, Stop, WorkerLoop, no_room
from edgefl_server.workers.shared_memory import SharedMemory, map_object

_STOP_S = 5.0
"""Seconds for a worker to stop."""

SEND_S = 30.0
"""Seconds for a worker to read a command: one that hangs must not block its caller."""


class _SharedReference:
    """Message that announces a :class:`SharedMemory`, whose file descriptor follows on the pipe."""


class WorkerProcess(Protocol):
    """Running worker process, with the interface of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ProcessLauncher:
    """Factory of workers that are processes of this machine.

    Args:
        table: Configuration table that sets the number of workers.
        send_s: Seconds after which a worker is killed that reads nothing; 0: no limit.
    """

    def __init__(self, table: str = "server", send_s: float = SEND_S) -> None:
        self._table = table
        self._send_s = send_s
        self._shared: list[SharedMemory] = []

    def share(self, thing: object) -> SharedMemory:
        """Return shared memory with the pickled object ``thing``, which can be sent to any worker of this launcher.

        The launcher keeps the first and the last shared object open, and closes all others.
        """
        memory = SharedMemory.of(thing)
        self._shared.append(memory)
        for old in self._shared[1:-1]:  # the first is what workers are built from, the last one the round
            old.close()
        del self._shared[1:-1]
        return memory

    def launch(self, settings: LoopSettings | SharedMemory, sink: EventSink[Any]) -> ProcessHandle:
        """Start a worker with ``settings``, or shared memory with them. Its messages go to ``sink``, on another
        thread.

        Raises:
            EdgeflError: The error of :func:`no_room`, if the machine cannot start a process.
        """
        here: socket.socket | None = None
        try:
            here, there = socket.socketpair()
            with there:
                process = self.start(there)
        except OSError as error:
            if here is not None:
                here.close()
            raise no_room(
                self._table,
                f"no worker can be started: {error.strerror or error}; set {self._table}.workers lower, or raise what the "
                "machine allows of processes, memory and open files (`ulimit -a`)",
            ) from error
        return ProcessHandle(process, here, settings, sink, self._send_s)

    def start(self, there: socket.socket) -> WorkerProcess:
        """Start a Python process that runs :func:`serve` with the worker's end ``there`` of the pipe, and return it.

        It does not receive Ctrl-C: its caller ends it.

        Raises:
            ConfigError: on Windows.
        """
        if sys.platform == "win32":
            raise not_on_windows("a worker process")
        return start_module("edgefl_server.workers.process", there)

    def close(self) -> None:
        """Close all shared memory in this process."""
        for memory in self._shared:
            memory.close()


class ProcessHandle:
    """Caller's end of one worker process. A thread passes the worker's messages to ``sink``, and :class:`Died` as the
    last.

    Args:
        process: Process of the worker.
        here: Caller's end of the pipe.
        settings: Settings of the worker.
        sink: Receives the worker's messages.
        send_s: Seconds after which a worker is killed that reads nothing.
    """

    def __init__(
        self,
        process: WorkerProcess,
        here: socket.socket,
        settings: LoopSettings | SharedMemory,
        sink: EventSink[Any],
        send_s: float = SEND_S,
    ) -> None:
        self._process = process
        seconds, microseconds = divmod(round(send_s * 1_000_000), 1_000_000)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, microseconds))
        self._socket = here
        self._connection = Connection(os.dup(here.fileno()))
        self._sink = sink
        self._sending = threading.Lock()
        self.send(settings)
        threading.Thread(target=self._receive, name="worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: object) -> None:
        """Send a command or shared memory. A worker that does not read it in time is killed.

        If the worker has ended, nothing happens; :class:`Died` reports that.
        """
        if sys.platform == "win32":
            raise not_on_windows("a worker process")
        with self._sending:
            try:
                if isinstance(command, SharedMemory):
                    self._connection.send(_SharedReference())
                    send_handle(self._connection, command.file.fileno(), 0)
                else:
                    self._connection.send(command)
            except OSError:  # it is gone or hangs; after a part of a message the pipe cannot be used any more
                self._end()

    def kill(self) -> None:
        """Kill the worker and wait for its end."""
        self._end()
        self._process.wait()

    def stop(self) -> None:
        """Send the command to stop, wait up to five seconds for the worker's end, then kill it."""
        self.send(Stop())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def _end(self) -> None:
        with suppress(OSError):  # the other side is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()

    def _receive(self) -> None:
        unread = ""
        try:
            while True:
                self._sink.put(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # unpickling can raise anything, and the message is lost
            unread = f"sent a message that cannot be read ({type(error).__name__}: {error})"
            self._end()
        code = self._process.wait()
        with self._sending:
            self._connection.close()
            self._socket.close()
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._sink.put(Died(unread or reason))


# -- the worker's end --------------------------------------------------------------------------------------------


class _PipeSink:
    """Sink that sends a worker's messages to its caller over the pipe. Messages are dropped if the caller is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, message: object, /) -> None:
        with suppress(OSError):  # the caller is gone, which the other thread notices
            self._connection.send(message)


def _read(connection: Connection) -> Any:
    if sys.platform == "win32":
        raise not_on_windows("a worker process")
    message = connection.recv()
    return map_object(recv_handle(connection)) if isinstance(message, _SharedReference) else message


def _listen(connection: Connection, loop: WorkerLoop) -> None:
    """Pass the caller's commands to the worker. When the caller is gone, stop the worker and exit this process."""
    try:
        while True:
            loop.send(_read(connection))
    except (EOFError, OSError):
        loop.send(Stop())
        time.sleep(loop.stop_s)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def serve(descriptor: int) -> None:
    """Run a worker. ``descriptor`` is the file descriptor of its end of the pipe. Returns when the worker has stopped."""
    connection = Connection(descriptor)
    settings: LoopSettings = _read(connection)
    loop = settings.build(_PipeSink(connection))
    # A thread reads, so that the caller never waits for the worker, and the worker ends with the pipe.
    threading.Thread(target=_listen, args=(connection, loop), daemon=True).start()
    with suppress(StoreError):  # reported before, at each retry
        loop.run()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
