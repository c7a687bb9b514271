"""What goes between a server and its workshop: objects, with the memory of their arrays beside them, as it lies.

::

    8 bytes: how many lengths follow | 8 bytes for each: of the head, of each array | the head | the arrays

A head is pickled. Both ends are one program of one user, and the socket between them has no name that anybody else could
connect to. What is not to be pickled, such as a function, goes under a name (``names``), for which the other side has
something of its own (``found``).
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

_PROTOCOL = 5
"""With buffers beside the head."""
_LOOK_MS = 1000
"""How often it is asked whether the other side lives: what was forked from it may hold the line open after its end."""


class LineEnded(Exception):
    """The other side is gone."""


class Line:
    """One end; used by one thread at a time. ``alive`` says whether the process at the other end runs."""

    def __init__(self, end: socket.socket, alive: Callable[[], bool] = lambda: True) -> None:
        self._end = end
        self._alive = alive
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, thing: object, names: Mapping[int, object] | None = None) -> None:
        """``names``: what stands for objects, by their ids. LineEnded if the other side is gone."""
        head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(head, names or {}, buffers).dump(thing)
        parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        lengths = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
        try:
            self._end.sendall(lengths)
            for part in parts:
                self._end.sendall(part)
        except OSError as error:
            raise LineEnded from error

    def receive(self, found: Callable[[Any], object] | None = None) -> Any:
        """What was sent, arrays in memory of their own. ``found`` gives what a name stands for. LineEnded if the other side
        is gone."""
        (count,) = struct.unpack("<Q", self._read(8))
        lengths = struct.unpack(f"<{count}Q", self._read(8 * count))
        head, *buffers = [self._read(length) for length in lengths]
        return _Unpickler(io.BytesIO(head), buffers, found).load()

    def _read(self, length: int) -> memoryview:
        room = np.empty(length, np.uint8).data  # a bytearray would be filled with zeros first
        left = room
        while left:
            try:
                while not self._poll.poll(_LOOK_MS):
                    if not self._alive():
                        raise LineEnded
                count = self._end.recv_into(left)
            except OSError as error:
                raise LineEnded from error
            if not count:
                raise LineEnded
            left = left[count:]
        return room

    def hang_up(self) -> None:
        """End what any thread waits for here."""
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
        self, head: io.BytesIO, buffers: list[memoryview], found: Callable[[Any], object] | None
    ) -> None:
        super().__init__(head, buffers=buffers)
        self._found = found

    def persistent_load(self, name: object) -> object:
        if self._found is None:
            raise pickle.UnpicklingError("a name came where none is known")
        return self._found(name)
