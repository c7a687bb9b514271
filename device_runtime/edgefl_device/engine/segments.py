"""A graph in segments: artifacts that run one after another as if they were one; what lives between them is on the disk."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from edgefl.errors import BundleError, StoreError
from edgefl.system.files import reserve_room
from edgefl.system.sizes import size
from edgefl.wire.bundle.graphs import Graph, split
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Outputs, State

# Values of a training step that wait on the disk: written and read as memory, and in no process's memory between.
#
# A page lies in one file for each loaded graph, which has no name from the beginning: whatever ends the process, nothing
# stays. A writer writes into a mapping of the file and a reader reads one, so nothing is copied; once a mapping is let go
# of, its bytes are the system's, which keeps them as long as it has room and writes them out otherwise.

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
                reserve_room(self._file, self.nbytes)
        except OSError as error:
            raise StoreError(
                f"no room for {size(self.nbytes)} that a training step keeps in {folder or tempfile.gettempdir()} "
                f"({error.strerror}): free some space, or put the store elsewhere",
                needed=self.nbytes,
            ) from error

    def room(self, port: Port) -> Array:
        """Return memory for the value of ``port``: it goes to the disk once it is released."""
        return self._array(port, mmap.ACCESS_WRITE)

    def value(self, port: Port) -> Array:
        """Return the value that was written last; pages are in memory once they are read, until it is released."""
        return self._array(port, mmap.ACCESS_READ)

    def _array(self, port: Port, access: int) -> Array:
        if port.name in self._small:
            return self._small[port.name]
        room = mmap.mmap(self._file.fileno(), _mapped(port), access=access, offset=self._places[port.name])
        entries = np.frombuffer(room, port.dtype, port.nbytes // np.dtype(port.dtype).itemsize, _lead(port))
        return entries.reshape(port.shape)


def _lead(port: Port) -> int:
    """Return the bytes before the value: some if it would end so close to the end of its last page that reads beyond it
    lies outside."""
    return _SLACK if -port.nbytes % mmap.PAGESIZE < _SLACK else 0


def _mapped(port: Port) -> int:
    """Return the bytes of the file for ``port``: whole pieces, as mappings begin at these."""
    whole = _lead(port) + port.nbytes + _SLACK
    return -(-whole // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class LoadedSegment(Protocol):
    """Artifact of an engine that writes outputs into given memory."""

    def run_into(self, feeds: Mapping[str, Array], state: State, rooms: Mapping[str, Array]) -> Outputs:
        """Run once as :meth:`edgefl_device.engine.base.LoadedGraph.run` does; outputs that ``rooms`` names are written
        into that memory, and are not among what is returned."""


class SegmentedGraph:
    """Loaded segments and the pages between them. Every segment reads the state that the step began with."""

    def __init__(self, parts: Sequence[tuple[Graph, LoadedSegment]], pages: Pages) -> None:
        self._parts = parts
        self._pages = pages

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        later_state: State = {}
        arrays: Arrays = {}
        for graph, loaded in self._parts:
            read = {port.name: self._pages.value(port) for port in graph.inputs_of("page")}
            rooms = {port.name: self._pages.room(port) for port in graph.outputs_of("page")}
            outputs = loaded.run_into({**feeds, **read}, state, rooms)
            del read, rooms
            later_state |= outputs.state
            arrays |= outputs.arrays
        return Outputs(later_state, arrays)


def load_segments(
    graph: Graph, artifact: bytes, folder: Path | None, load: Callable[[Graph, bytes], LoadedSegment]
) -> SegmentedGraph:
    """Return the segments of ``graph``, each loaded by ``load``; BundleError if the blob has others than the manifest."""
    artifacts = split(artifact)
    if len(artifacts) != len(graph.segments):
        raise BundleError(
            f"graph {graph.name!r} has {len(graph.segments)} segments in its manifest and {len(artifacts)} in its blob; "
            "export the bundle again",
            graph=graph.name,
        )
    parts = []
    for segment, model in zip(graph.segments, artifacts, strict=True):
        part = msgspec.structs.replace(
            graph, inputs=segment.inputs, outputs=segment.outputs, in_place=segment.in_place, segments=()
        )
        parts.append((part, load(part, model)))
    made = [port for segment in graph.segments for port in segment.outputs if port.role == "page"]
    return SegmentedGraph(parts, Pages(made, folder))
