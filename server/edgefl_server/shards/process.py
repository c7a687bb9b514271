"""Workers as processes of this machine, each at the other end of a pipe. They end when the server does, however it does.

``python -m edgefl_server.shards.process DESCRIPTOR`` is what such a process runs.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from edgefl.errors import StoreError
from edgefl.system.python import start_module
from edgefl_server.shards.messages import Died, News, Order, Stop, Told
from edgefl_server.shards.worker import Worker

_FAREWELL_S = 5.0
"""For a worker to leave the broker; what it has not journaled is nobody's loss."""

PATIENCE_S = 30.0
"""For a worker to read what it is told: one that stands still does not hold up its server."""


class Begun(Protocol):
    """A process that runs :func:`main`, as :class:`subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def begin(there: socket.socket) -> Begun:
    """A Python of its own, with the worker's end of the pipe. Ctrl-C is for the server, which then ends it."""
    return start_module("edgefl_server.shards.process", there)


def _begun(begin: Callable[[socket.socket], Begun]) -> tuple[Begun, socket.socket]:
    """The process, and this end of the pipe to it."""
    here: socket.socket | None = None
    try:
        here, there = socket.socketpair()
        with there:
            return begin(there), here
    except OSError as error:
        if here is not None:
            here.close()
        raise StoreError(
            f"no worker can be started: {error.strerror or error}; set server.workers lower, or raise what the machine "
            "allows of processes, memory and open files (`ulimit -a`)"
        ) from error


class ProcessHand:
    """The server's end. ``deliver`` gets what the worker says, on a thread of its own; :class:`Died` is its last word.
    StoreError where the machine has no room for a process. One that reads nothing for ``patience_s`` is killed."""

    def __init__(
        self,
        told: Told,
        deliver: Callable[[News], None],
        begin: Callable[[socket.socket], Begun] = begin,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._process, here = _begun(begin)
        whole, part = divmod(round(patience_s * 1_000_000), 1_000_000)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, part))
        self._connection = Connection(here.detach())
        self._deliver = deliver
        self._sending = threading.Lock()
        self._send(told)
        threading.Thread(target=self._hear, name=f"worker-{told.worker}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: Order) -> None:
        """A worker that is gone hears nothing, which is told elsewhere."""
        self._send(order)

    def kill(self) -> None:
        """At once; whatever it did not journal is lost."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Let it leave the broker, and wait for that."""
        self.tell(Stop())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)
        self.kill()

    def _send(self, thing: Told | Order) -> None:
        with self._sending:
            try:
                self._connection.send(thing)
            except OSError:  # it is gone, or stands still: behind half of a message nothing can be said
                self._process.kill()

    def _hear(self) -> None:
        try:
            while True:
                self._deliver(self._connection.recv())
        except (EOFError, OSError):
            code = self._process.wait()
            why = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._deliver(Died(why))


def main(descriptor: int) -> None:
    """The worker's end."""
    connection = Connection(descriptor)

    def say(news: News) -> None:
        with suppress(OSError):  # the server is gone, which the other thread hears
            connection.send(news)

    def listen(worker: Worker) -> None:
        try:
            while True:
                worker.tell(connection.recv())
        except (EOFError, OSError):
            worker.tell(Stop())
            time.sleep(_FAREWELL_S)
            os._exit(0)

    worker = Worker(connection.recv(), say)
    threading.Thread(target=listen, args=(worker,), daemon=True).start()
    with suppress(StoreError):  # told before, again and again
        worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
