"""Connection between a server and its torch process: pickled objects, with the memory of arrays sent without a copy.

::

    8 bytes: number of lengths | 8 bytes for each length: pickle, arrays | pickle | arrays

Both ends are the same program of the same user, and no other process can connect to the socket pair. An object that
cannot be pickled, such as a function, is sent as a placeholder (``names``), which the receiver resolves
(:class:`PlaceholderResolver`).
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from edgefl.errors import not_on_windows

_PROTOCOL = 5
"""First protocol with buffers outside of the head."""
_LOOK_MS = 1000
"""Interval of the checks that the other side lives: a process forked from it may hold the socket open after its end."""


class ConnectionEnded(Exception):
    """Error: the process at the other end has closed the connection or ended."""


class PlaceholderResolver(Protocol):
    """Source of the objects for placeholders: the other process sends these instead of objects that cannot be pickled."""

    def resolve(self, name: Any) -> object:
        """Return the object that the placeholder ``name`` represents."""


class PickleConnection:
    """One end of a connection that sends pickled objects over the socket ``end``; for one thread at a time.

    If the process ``other`` is given, the connection also ends with that process.
    """

    _poll: Any

    def __init__(self, end: socket.socket, other: subprocess.Popen[bytes] | None = None) -> None:
        self._end = end
        self._other = other
        if sys.platform == "win32":
            raise not_on_windows("a server")
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, thing: object, names: Mapping[int, object] | None = None) -> None:
        """Pickle and send the object ``thing``. Blocks until the other end has received it.

        ``names`` are placeholders, by the id() of the objects that they replace.

        Raises:
            ConnectionEnded: If the other end is closed.
        """
        head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(head, names or {}, buffers).dump(thing)
        parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        lengths = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
        try:
            self._end.sendall(lengths)
            for part in parts:
                self._end.sendall(part)
        except OSError as error:
            raise ConnectionEnded from error

    def receive(self, resolver: PlaceholderResolver | None = None) -> Any:
        """Wait for the next object and return it, with its arrays in new memory.

        ``resolver`` returns the objects for placeholders; without one, placeholders are an error.

        Raises:
            ConnectionEnded: If the other end is closed.
            UnpicklingError: If a placeholder arrives and ``resolver`` is None.
        """
        (count,) = struct.unpack("<Q", self._read(8))
        lengths = struct.unpack(f"<{count}Q", self._read(8 * count))
        head, *buffers = [self._read(length) for length in lengths]
        return _Unpickler(io.BytesIO(head), buffers, resolver).load()

    def _read(self, length: int) -> memoryview:
        room = np.empty(length, np.uint8).data  # a bytearray would be filled with zeros first
        left = room
        while left:
            try:
                while not self._poll.poll(_LOOK_MS):
                    if self._other is not None and self._other.poll() is not None:
                        raise ConnectionEnded
                count = self._end.recv_into(left)
            except OSError as error:
                raise ConnectionEnded from error
            if not count:
                raise ConnectionEnded
            left = left[count:]
        return room

    def hang_up(self) -> None:
        """Shut down the socket, which wakes threads that wait for it with ConnectionEnded."""
        with suppress(OSError):  # the other side did
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class _Pickler(pickle.Pickler):
    def __init__(
        self, head: io.BytesIO, names: Mapping[int, object], buffers: list[pickle.PickleBuffer]
    ) -> None:
        super().__init__(head, _PROTOCOL, buffer_callback=buffers.append)
        self._names = names

    def persistent_id(self, thing: object) -> object:
        return self._names.get(id(thing))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, head: io.BytesIO, buffers: list[memoryview], resolver: PlaceholderResolver | None
    ) -> None:
        super().__init__(head, buffers=buffers)
        self._resolver = resolver

    def persistent_load(self, name: object) -> object:
        if self._resolver is None:
            raise pickle.UnpicklingError("a name came where none is known")
        return self._resolver.resolve(name)
