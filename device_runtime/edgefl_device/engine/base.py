"""Interface of engines. State stays inside the engine between calls."""

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
    """Result of a call: ``state`` inside the engine, everything else as numpy arrays by port name."""

    state: State
    arrays: Arrays


class LoadedGraph(Protocol):
    """A graph ready to run."""

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        """Run once. ``feeds`` holds every input that is not state; extra entries of ``state`` are ignored.

        ``state`` is used up where the graph rewrites it: this run may write ports of ``Graph.in_place`` into that memory,
        a later run the others.
        """


class Engine(Protocol):
    """A runtime for one artifact format."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def format(self) -> str:
        """The ``Graph.format`` this engine runs."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads that a graph may have, in order; without a number it has the engine's own."""

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:
        """Make ``artifact`` runnable, with one of the ``thread_counts`` (0: the engine's own); BundleError if it is damaged
        or its ports differ from the manifest."""

    def read_state(self, state: State) -> Arrays:
        """Return the state's tensors, for a checkpoint; they may share its memory, so write them before the next run."""

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        """Return the state with these tensors: the inverse of :meth:`read_state`."""
