"""A round under watch: what each stage of it takes, and when each begins."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from device_runtime.engine.base import Engine, LoadedGraph, Outputs, State
from device_runtime.profile.measure.folder import BundleFolder
from device_runtime.profile.measure.sampler import MemorySampler
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.bundle.profiles import Span
from edgefl.wire.tensors import Array, Arrays


@dataclass
class Stage:
    """From the fetch of a graph's weights, or its load, to that of the next. Times in milliseconds."""

    graph: str
    start_ms: float
    fetch_bytes: int = 0
    fetch_ms: float = 0.0
    load_ms: float = 0.0
    run_ms: float = 0.0
    end_ms: float = 0.0


@dataclass
class WatchedEngine:
    """An engine that notes every load and every run of ``inner``."""

    inner: Engine
    folder: BundleFolder
    sampler: MemorySampler
    stages: list[Stage] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def version(self) -> str:
        return self.inner.version

    @property
    def format(self) -> str:
        return self.inner.format

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return self.inner.thread_counts

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:
        start = time.perf_counter()
        began = self.folder.asked or start
        stage = Stage(graph.name, self.sampler.ms_of(began))
        fetched = self.folder.reads[:-1]  # the last one was the graph
        stage.fetch_bytes = sum(size for size, _ in fetched)
        stage.fetch_ms = sum(took for _, took in fetched)
        self.folder.asked, self.folder.reads = 0.0, []
        if self.stages:
            self.stages[-1].end_ms = stage.start_ms
        self.stages.append(stage)
        loaded = self.inner.load(graph, artifact, threads)
        stage.load_ms = 1e3 * (time.perf_counter() - start)
        return _WatchedGraph(loaded, stage)

    def read_state(self, state: State) -> Arrays:
        return self.inner.read_state(state)

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        return self.inner.write_state(arrays)

    def spans(self, manifest: Manifest) -> tuple[Span, ...]:
        """The stages with the names that people read."""
        chunks = {chunk.graph: number for number, chunk in enumerate(manifest.prefix, 1)}
        labels = {graph: f"chunk {number} of {len(chunks)}" for graph, number in chunks.items()}
        labels |= {phase.graph: f"training ({phase.name})" for phase in manifest.phases}
        return tuple(
            Span(label=labels.get(stage.graph, stage.graph), start_ms=stage.start_ms, end_ms=stage.end_ms)
            for stage in self.stages
        )


@dataclass(frozen=True)
class _WatchedGraph:
    inner: LoadedGraph
    stage: Stage

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        start = time.perf_counter()
        outputs = self.inner.run(feeds, state)
        self.stage.run_ms += 1e3 * (time.perf_counter() - start)
        return outputs
