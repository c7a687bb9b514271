"""One short round in this process, on random data: I/O of the multi-step forward pass, and memory over time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.bundle.profiles import ChunkProfile, GraphProfile, MemoryTimeline, TimeSpan
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import FittedData
from edgefl_device.engine.base import Engine, LoadedGraph, Outputs, State
from edgefl_device.host import anonymous_bytes, trim_memory
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.inputs import RandomInputs
from edgefl_device.profile.measure.meters import MemorySampler
from edgefl_device.round.control import RoundControl
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.job import Job
from edgefl_device.round.offline import NoCheckpoints
from edgefl_device.round.trainer import LocalTrainer

# A round under watch: what each stage of it takes, and when each begins.


@dataclass
class RoundStage:
    """Stage of a measured round: download of a graph's weights, load and runs of the graph. Times in milliseconds.

    It ends where the stage of the next graph begins.
    """

    graph: str
    start_ms: float
    fetch_bytes: int = 0
    fetch_ms: float = 0.0
    load_ms: float = 0.0
    run_ms: float = 0.0
    end_ms: float = 0.0


@dataclass
class WatchedEngine:
    """Engine that records each load of a graph, and its runs, as a stage of the round; ``inner`` does the work."""

    inner: Engine
    folder: BundleFolder
    sampler: MemorySampler
    stages: list[RoundStage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.version = self.inner.name, self.inner.version
        self.format, self.thread_counts = self.inner.format, self.inner.thread_counts

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:
        start = time.perf_counter()
        began = self.folder.asked or start
        stage = RoundStage(graph.name, self.sampler.ms_of(began))
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

    def spans(self, manifest: Manifest) -> tuple[TimeSpan, ...]:
        """Return the recorded stages with labels for people."""
        chunks = {chunk.graph: number for number, chunk in enumerate(manifest.prefix, 1)}
        labels = {graph: f"chunk {number} of {len(chunks)}" for graph, number in chunks.items()}
        labels |= {phase.graph: f"training ({phase.name})" for phase in manifest.phases}
        return tuple(
            TimeSpan(label=labels.get(stage.graph, stage.graph), start_ms=stage.start_ms, end_ms=stage.end_ms)
            for stage in self.stages
        )


@dataclass(frozen=True)
class _WatchedGraph:
    inner: LoadedGraph
    stage: RoundStage

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        start = time.perf_counter()
        outputs = self.inner.run(feeds, state)
        self.stage.run_ms += 1e3 * (time.perf_counter() - start)
        return outputs


STEPS = 4
"""Most training steps of each phase: memory reaches its peak in the second at the latest."""


class RoundProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and I/O of the measured round. ``idle_bytes`` is the memory of the process with its engine open."""

    idle_bytes: int
    peak_bytes: int
    io: tuple[ChunkProfile, ...]
    timeline: MemoryTimeline


def profile_round(engine: Engine, folder: BundleFolder, rows: int) -> RoundProfile:
    """Run one short round with random weights and data from files, and return its memory and I/O.

    Args:
        engine: The open engine.
        folder: The unpacked bundle.
        rows: Local rows; 0: two batches.
    """
    idle, whole = anonymous_bytes(), folder.manifest
    phases = tuple(msgspec.structs.replace(phase, steps=min(phase.steps, STEPS)) for phase in whole.phases)
    manifest = msgspec.structs.replace(whole, phases=phases)
    inputs = RandomInputs(whole)
    job = _job(folder, whole, inputs)
    data = inputs.samples(rows or 2 * whole.batch)
    trim_memory()
    profiler = RoundProfiler()
    with MemorySampler() as sampler:
        watched = WatchedEngine(engine, folder, sampler)
        loader = GraphLoader(watched, manifest, folder, profiler)
        trainer = LocalTrainer(loader, NoCheckpoints(), folder.path)
        trainer.train(job, data, {}, RoundControl())  # zeros, as in a first round
        watched.stages[-1].end_ms = sampler.now_ms
    return RoundProfile(
        idle_bytes=idle,
        peak_bytes=max(idle, *(moment.rss_bytes for moment in sampler.moments)),
        io=_chunks(manifest, watched.stages, profiler, data),
        timeline=MemoryTimeline(moments=sampler.moments, spans=watched.spans(manifest)),
    )


def _job(folder: BundleFolder, manifest: Manifest, inputs: RandomInputs) -> Job:
    """Return the job of the measured round; its random weights are written into the folder as blobs."""
    masks = {
        port.label: port.mask for graph in manifest.graphs for port in graph.inputs_of("weights") if port.mask
    }
    units: dict[str, tuple[BlobRef, ...]] = {
        unit: (
            folder.add(tensors.dump(arrays, {name: masks[name] for name in arrays.keys() & masks.keys()})),
        )
        for unit, arrays in inputs.weights(manifest).items()
    }
    scalars = {port.label for graph in manifest.graphs for port in graph.inputs_of("hyper")}
    return Job(
        run="profile",
        round=1,
        tier=manifest.tier,
        seed=0,
        nonce="profile",
        samples=0,
        model_version="random",
        bundle=folder.add(b"profile"),
        units=units,
        hyper={label: manifest.hyper.get(label, 0.0) for label in scalars},
    )


def _chunks(
    manifest: Manifest, stages: list[RoundStage], profiler: RoundProfiler, data: FittedData
) -> tuple[ChunkProfile, ...]:
    by_graph = {stage.graph: stage for stage in stages}
    forward, written = (iter(profiler.times_ms.get(name, [])) for name in ("forward", "write"))
    profiles = []
    for chunk in manifest.prefix:
        spec, stage = manifest.graph(chunk.graph), by_graph[chunk.graph]
        (port,), (out,) = spec.inputs_of("batch"), spec.outputs_of("record")
        groups = math.ceil(len(data) / port.shape[0])
        reading = sum(islice(forward, groups)) - stage.run_ms
        writing = sum(islice(written, groups + 2))  # the record is made, filled and sealed
        profiles.append(
            ChunkProfile(
                graph=chunk.graph,
                units=chunk.units,
                rows=len(data),
                fetch_bytes=stage.fetch_bytes,
                fetch_ms=round(stage.fetch_ms, 3),
                load_ms=round(stage.load_ms, 3),
                read_bytes=groups * port.nbytes,
                read_ms=round(max(0.0, reading), 3),
                forward_ms=round(stage.run_ms, 3),
                write_bytes=len(data) * (out.nbytes // max(1, out.shape[0])),
                write_ms=round(writing, 3),
            )
        )
    return tuple(profiles)


ROUND, GRAPH = "round", "graph:"


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a measuring process: the profile of one graph or of the round, and facts about the engine."""

    version: str
    open_ms: float
    graph: GraphProfile | None = None
    round: RoundProfile | None = None
