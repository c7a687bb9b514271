"""Workers in processes of this machine."""

from __future__ import annotations

import atexit
import socket
import subprocess
from collections.abc import Collection
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle

from edgefl.simulator.trainers.memory import Memory, Shared
from edgefl.simulator.trainers.pool import Lost, RemoteWorker
from edgefl.simulator.trainers.worker import Method
from edgefl.system.python import start_module


class ForkedWorker:
    """A worker at the other end of a ``connection``."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, method: Method, *given: object) -> None:
        try:
            self.connection.send(
                (method, tuple(Shared() if isinstance(each, Memory) else each for each in given))
            )
            for each in given:
                if isinstance(each, Memory):
                    send_handle(self.connection, each.file.fileno(), 0)
        except OSError:
            return  # the answer never comes, which is noticed there

    def answer(self) -> object:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise Lost from error

    def close(self) -> None:
        self.connection.close()


class Processes:
    """Factory of worker processes, which are forked from one that is kept for the next simulation."""

    def __init__(self) -> None:
        self._shared: list[Memory] = []

    def hire(self) -> ForkedWorker:
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(_template(), [b"w"], [there.fileno()])
            except OSError:  # somebody ended it
                _template.cache_clear()
                socket.send_fds(_template(), [b"w"], [there.fileno()])
        return ForkedWorker(Connection(here.detach()))

    def share(self, thing: object) -> Memory:
        memory = Memory.of(thing)
        self._shared.append(memory)
        for old in self._shared[1:-1]:  # the first is what workers are built from, the last one the round
            old.close()
        del self._shared[1:-1]
        return memory

    def ready(self, hands: Collection[RemoteWorker]) -> RemoteWorker:
        by_connection = {hand.connection: hand for hand in hands if isinstance(hand, ForkedWorker)}
        first = wait(list(by_connection))[0]
        assert isinstance(first, Connection)
        return by_connection[first]

    def close(self) -> None:
        for memory in self._shared:
            memory.close()


@cache
def _template() -> socket.socket:
    """The process that workers are forked from. In a session of its own: Ctrl-C is for this one, which then ends them."""
    here, there = socket.socketpair()
    with there:
        process = start_module("edgefl.simulator.trainers.template", there)
    atexit.register(_end, here, process)
    return here


def _end(own: socket.socket, process: subprocess.Popen[bytes]) -> None:
    own.close()
    process.wait()
