"""Values of a training step that wait on the disk: written and read as memory, and in no process's memory between.

A page lies in one file for each loaded graph, which has no name from the beginning: whatever ends the process, nothing
stays. A writer writes into a mapping of the file and a reader reads one, so nothing is copied; once a mapping is let go
of, its bytes are the system's, which keeps them as long as it has room and writes them out otherwise.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from device_runtime.disk import reserve
from edgefl.system.sizes import size
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.errors import StoreError
from edgefl.wire.tensors import Array, Arrays

SMALL_BYTES = 1 << 16
"""Values below this stay in memory: there are many, and together they are little."""
_SLACK = 64
"""Engines may read so far beyond the end of an input, and want its beginning at a multiple of this."""


class Pages:
    """Room for the values of ``ports``, in a file in ``folder`` (default: the system's for temporary files).

    StoreError if the disk has no room for them.
    """

    def __init__(self, ports: Iterable[Port], folder: Path | None) -> None:
        ports = list(ports)
        self._small: Arrays = {
            port.name: np.empty(port.shape, port.dtype) for port in ports if port.nbytes < SMALL_BYTES
        }
        self._places: dict[str, int] = {}
        self.nbytes = 0
        for port in ports:
            if port.name not in self._small:
                self._places[port.name] = self.nbytes
                self.nbytes += _mapped(port)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the graph that it belongs to
            if self.nbytes:
                reserve(self._file, self.nbytes)
        except OSError as error:
            raise StoreError(
                f"no room for {size(self.nbytes)} that a training step keeps in {folder or tempfile.gettempdir()} "
                f"({error.strerror}): free some space, or put the store elsewhere",
                needed=self.nbytes,
            ) from error

    def room(self, port: Port) -> Array:
        """Memory to write the value of ``port`` to: what is written is on its way to the disk once this is let go of."""
        return self._array(port, mmap.ACCESS_WRITE)

    def value(self, port: Port) -> Array:
        """The value that was written last, in memory as far as it is read, until this is let go of."""
        return self._array(port, mmap.ACCESS_READ)

    def _array(self, port: Port, access: int) -> Array:
        if port.name in self._small:
            return self._small[port.name]
        room = mmap.mmap(self._file.fileno(), _mapped(port), access=access, offset=self._places[port.name])
        entries = np.frombuffer(room, port.dtype, port.nbytes // np.dtype(port.dtype).itemsize, _lead(port))
        return entries.reshape(port.shape)


def _lead(port: Port) -> int:
    """Bytes before the value: some where it would end so close before the end of its last page that what is read beyond it
    lies outside."""
    return _SLACK if -port.nbytes % mmap.PAGESIZE < _SLACK else 0


def _mapped(port: Port) -> int:
    """Bytes of the file for ``port``: whole pieces, as mappings begin at these."""
    whole = _lead(port) + port.nbytes + _SLACK
    return -(-whole // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
