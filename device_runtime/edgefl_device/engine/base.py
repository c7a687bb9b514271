"""Interface of engines. Training state stays inside the engine between calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Array, Arrays

State = dict[str, Any]
"""Engine-held tensors by port name (``state.weights.head.bias``). Opaque to everyone but the engine."""


@dataclass(frozen=True)
class Outputs:
    """Result of running a graph: new ``state`` inside the engine, and all other outputs as numpy arrays by port name."""

    state: State
    arrays: Arrays


class LoadedGraph(Protocol):
    """Interface of a graph that an engine has loaded."""

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        """Run the graph once.

        Args:
            feeds: All inputs but state, by port name.
            state: State by port name; entries that the graph does not read are ignored. Do not use it again if the
                graph rewrites it: this run may overwrite ports of ``Graph.in_place``, and a later run the others.

        Returns:
            The new state, and the other outputs as arrays by port name.
        """


class Engine(Protocol):
    """Interface of an engine: a runtime that loads and runs graphs of one artifact format, and keeps their state."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def format(self) -> str:
        """Format of the graphs that this engine runs (``Graph.format``)."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads that a graph can be loaded with, ascending."""

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:
        """Load a graph.

        Args:
            graph: The manifest's entry of the graph.
            artifact: Its bytes, decompressed.
            threads: One of :attr:`thread_counts`; 0: the engine's own number.

        Raises:
            BundleError: The bytes are damaged, or the ports differ from the manifest.
        """

    def read_state(self, state: State) -> Arrays:
        """Return the tensors of ``state`` as arrays. They may share its memory: copy or write them before the next run."""

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        """Return a new state with these tensors; the inverse of :meth:`read_state`."""
