"""One thing with many arrays in memory that processes of this machine share: written once, mapped by each of them.

The memory has no name: it is gone with the last process that has it, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

_ALIGNED = 64
_COUNT = struct.Struct("<q")


@dataclass(frozen=True)
class Memory:
    """Open for its life. ``file`` has a descriptor, which can be sent to another process for :func:`mapped`."""

    file: BinaryIO

    @classmethod
    def of(cls, thing: object) -> Memory:
        """``thing``, pickled, its arrays as they are."""
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
        """Who has mapped it keeps it."""
        self.file.close()


class Shared:
    """Stands for a :class:`Memory` in a message, after which its descriptor comes."""


def mapped(descriptor: int) -> object:
    """What another process wrote; its arrays can be read only. Closes the descriptor."""
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
