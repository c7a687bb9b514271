"""Frames on the pipes between an agent and its engine's process: a head in msgpack, then raw arrays.

::

    8 bytes: length of the head, little-endian | head | bytes of each array, one after the other

Both sides compute the number of following bytes from the manifest's ports, so neither trusts the other's numbers.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from edgefl.wire.tensors import Array

MOST_HEAD = 64 << 20
"""A head has a graph's manifest entry in it, or names and shapes of state."""
_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, Linux


class PipeClosed(Exception):
    """The other side closed the pipe or violated the protocol."""


class TookTooLong(Exception):
    """The deadline passed before all bytes were read or written."""


@dataclass
class EnginePipe:
    """Two-way connection to another process: the reading end of one pipe and the writing end of another.

    ``until`` is a deadline (``time.monotonic``) after which reads and writes raise TookTooLong; the writing end must
    then be non-blocking.
    """

    read_end: int
    write_end: int
    until: float | None = None

    def send(self, head: bytes, arrays: Iterable[Array] = ()) -> None:
        """Write one frame: ``head``, then the bytes of ``arrays``.

        Raises:
            PipeClosed: The other side is gone.
            TookTooLong: The deadline passed.
        """
        try:
            self._write(memoryview(len(head).to_bytes(8, "little") + head))
            for array in arrays:
                self._write(memory_of(array))
        except OSError as error:
            raise PipeClosed from error

    def _write(self, data: memoryview) -> None:
        while data:
            self._wait([], [self.write_end])
            with suppress(BlockingIOError):
                data = data[os.write(self.write_end, data) :]

    def head(self) -> bytes:
        """Read and return the head of the next frame.

        Raises:
            PipeClosed: The other side is gone.
            TookTooLong: The deadline passed.
        """
        room = bytearray(8)
        self.fill(memoryview(room))
        length = int.from_bytes(room, "little")
        if length > MOST_HEAD:
            raise PipeClosed
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Read and return the next array of a frame; the caller knows its type and shape.

        Raises:
            PipeClosed: The other side is gone.
            TookTooLong: The deadline passed.
        """
        array: Array = np.empty(shape, dtype)
        self.fill(memory_of(array))
        return array

    def fill(self, room: memoryview) -> None:
        """Read exactly as many bytes as fit into ``room``.

        Raises:
            PipeClosed: The other side is gone.
            TookTooLong: The deadline passed.
        """
        if sys.platform == "win32":
            raise PipeClosed
        while room:
            self._wait([self.read_end], [])
            try:
                count = os.readv(self.read_end, [room])
            except OSError as error:
                raise PipeClosed from error
            if not count:
                raise PipeClosed
            room = room[count:]

    def _wait(self, reading: list[int], writing: list[int]) -> None:
        if self.until is not None:
            left = max(0.0, self.until - time.monotonic())
            if not any(select.select(reading, writing, [], left)):
                raise TookTooLong


def widen(end: int) -> None:
    """Enlarge the buffer of the pipe with the file descriptor ``end`` if the system can, for fewer switches between the
    processes.
    """
    if sys.platform == "win32":
        return
    import fcntl

    with suppress(OSError):
        fcntl.fcntl(end, _SET_PIPE_SIZE, _PIPE_BYTES)


def memory_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array as a view of bytes."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
