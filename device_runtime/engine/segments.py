"""A graph in segments: artifacts that run one after another as if they were one; what lives between them is on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from device_runtime.engine.base import Outputs, State
from device_runtime.engine.pages import Pages
from edgefl.wire.bundle.graphs import Graph, split
from edgefl.wire.errors import BundleError
from edgefl.wire.tensors import Array, Arrays


class LoadedSegment(Protocol):
    """An artifact of an engine that writes outputs where it is told."""

    def run_into(self, feeds: Mapping[str, Array], state: State, rooms: Mapping[str, Array]) -> Outputs:
        """Run once as :meth:`device_runtime.engine.base.LoadedGraph.run` does; outputs that ``rooms`` names are written
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
    """The segments of ``graph``, each made runnable by ``load``; BundleError if the blob has others than the manifest."""
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
