"""Workers in processes of this machine, and memory with many arrays that they share.

The memory is written once and mapped by each process. It has no name, so it is freed with the last process that holds it.
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import socket
import struct
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import BinaryIO

from edgefl.simulator.trainers.pool import RemoteWorker, WorkerLost
from edgefl.simulator.trainers.worker import Method
from edgefl.system.processes import start_module

_ALIGNED = 64
_COUNT = struct.Struct("<q")


@dataclass(frozen=True)
class SharedMemory:
    """Open shared memory. Its ``file`` has a descriptor, which can be sent to another process for :func:`mapped`."""

    file: BinaryIO

    @classmethod
    def of(cls, thing: object) -> SharedMemory:
        """Return memory with the pickled ``thing`` and its arrays."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
        file = _nameless()
        for part in (memoryview(head), *(buffer.raw() for buffer in buffers)):
            file.write(_COUNT.pack(part.nbytes))
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(part)
        file.flush()
        return cls(file)

    def close(self) -> None:
        """Close it here. Processes that mapped it keep it."""
        self.file.close()


class SharedReference:
    """Placeholder for a :class:`SharedMemory` in a message; its descriptor follows."""


def mapped(descriptor: int) -> object:
    """Return the object that another process wrote, with read-only arrays. Closes the descriptor."""
    size = os.fstat(descriptor).st_size
    whole = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
    os.close(descriptor)
    parts, at = [], 0
    while at < size:
        (count,) = _COUNT.unpack_from(whole, at)
        at += _COUNT.size
        at += -at % _ALIGNED
        parts.append(whole[at : at + count])
        at += count
    return pickle.loads(parts[0], buffers=parts[1:])


def _nameless() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("edgefl"), "w+b")
    return tempfile.TemporaryFile()


class ForkedWorker:
    """Worker at the other end of a ``connection``."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, method: Method, *given: object) -> None:
        try:
            self.connection.send(
                (
                    method,
                    tuple(SharedReference() if isinstance(each, SharedMemory) else each for each in given),
                )
            )
            for each in given:
                if isinstance(each, SharedMemory):
                    send_handle(self.connection, each.file.fileno(), 0)
        except OSError:
            return  # the answer never comes, which is noticed there

    def answer(self) -> object:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost from error

    def close(self) -> None:
        self.connection.close()


class Processes:
    """Factory of worker processes, which are forked from one that is kept for the next simulation."""

    def __init__(self) -> None:
        self._shared: list[SharedMemory] = []

    def hire(self) -> ForkedWorker:
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(_template(), [b"w"], [there.fileno()])
            except OSError:  # somebody ended it
                _template.cache_clear()
                socket.send_fds(_template(), [b"w"], [there.fileno()])
        return ForkedWorker(Connection(here.detach()))

    def share(self, thing: object) -> SharedMemory:
        memory = SharedMemory.of(thing)
        self._shared.append(memory)
        for old in self._shared[1:-1]:  # the first is what workers are built from, the last one the round
            old.close()
        del self._shared[1:-1]
        return memory

    def ready(self, workers: Collection[RemoteWorker]) -> RemoteWorker:
        by_connection = {worker.connection: worker for worker in workers if isinstance(worker, ForkedWorker)}
        first = wait(list(by_connection))[0]
        assert isinstance(first, Connection)
        return by_connection[first]

    def close(self) -> None:
        for memory in self._shared:
            memory.close()


@cache
def _template() -> socket.socket:
    """Start the process that workers are forked from, in its own session: Ctrl-C reaches this process only."""
    here, there = socket.socketpair()
    with there:
        process = start_module("edgefl.simulator.trainers.template", there)
    atexit.register(_end, here, process)
    return here


def _end(own: socket.socket, process: subprocess.Popen[bytes]) -> None:
    own.close()
    process.wait()
