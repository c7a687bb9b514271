"""Memory with arrays that several processes share.

It is written once and mapped by each process. It has no name, so it is freed with the last process that uses it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from dataclasses import dataclass
from typing import IO, Any

_ALIGNED = 64
_COUNT = struct.Struct("<q")


@dataclass(frozen=True)
class SharedMemory:
    """Memory without a name, written once, that other processes map.

    A process that receives the descriptor of ``file`` maps it with :func:`map_object`.
    """

    file: IO[bytes]

    @classmethod
    def of(cls, thing: object) -> SharedMemory:
        """Return new shared memory with the pickled object ``thing`` and copies of its arrays."""
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
        """Release the shared memory in this process. Other processes that mapped it are not affected."""
        self.file.close()


def _nameless() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("edgefl"), "w+b")
    return tempfile.TemporaryFile()


def map_object(descriptor: int) -> Any:
    """Return the object in the shared memory of the file descriptor, whose arrays are read-only views of it.

    The descriptor is closed.
    """
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
