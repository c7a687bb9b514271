"""Measurement of one graph in this process: loading, running, memory, energy, and the costliest ops."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.bundle.profiles import CallTimes, GraphProfile, How, Kind, PeakMemory
from edgefl.wire.bundle.sources import OpOrigin
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.base import Engine, LoadedGraph, State
from edgefl_device.host import anonymous_bytes, trim_memory
from edgefl_device.profile.measure import ops
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.inputs import RandomInputs
from edgefl_device.profile.measure.meters import open_meter
from edgefl_device.profile.measure.ops import Trace
from edgefl_device.round.autotune import Autotuner, TrialStep, TuningResult

WARM = 2
"""Calls before those that count: engines plan and allocate in the first."""

TRACED = 5
"""Most calls under the engine's profiler."""


def kinds(manifest: Manifest) -> dict[str, Kind]:
    """Return the purpose of each graph that a device may run, by graph name, in the order of a round."""
    graph_kinds: dict[str, Kind] = {chunk.graph: "forward" for chunk in manifest.prefix}
    graph_kinds[manifest.start] = "start"
    graph_kinds |= {phase.graph: "step" for phase in manifest.phases}
    graph_kinds[manifest.finish], graph_kinds[manifest.evaluate] = "finish", "evaluate"
    return graph_kinds | ({manifest.personalize: "personalize"} if manifest.personalize else {})


@dataclass
class _RunningGraph:
    """Inputs of a graph that is measured, and its state, which each call replaces."""

    feeds: Arrays
    state: State = field(default_factory=dict)

    def once(self, loaded: LoadedGraph) -> None:
        self.state = {**self.state, **loaded.run(self.feeds, self.state).state}


def profile_graph(engine: Engine, threads: int, folder: BundleFolder, name: str, repeat: int) -> GraphProfile:
    """Measure the graph ``name`` and return its costs. Call it in a process with an open engine that has loaded no
    graph.

    Args:
        engine: The open engine.
        threads: Threads of the engine, for the trace.
        folder: The unpacked bundle.
        name: Name of the graph.
        repeat: Measured calls.
    """
    manifest, idle = folder.manifest, anonymous_bytes()
    spec, inputs = manifest.graph(name), RandomInputs(manifest)
    running = _RunningGraph(inputs.feeds(spec), state_before(engine, folder, manifest, spec, inputs))
    trim_memory()
    start = time.perf_counter()
    loaded = engine.load(spec, folder.get(spec.blob))
    load_ms = 1e3 * (time.perf_counter() - start)
    times, joules = _time_calls(running, loaded, repeat)
    peak = anonymous_bytes() - idle  # the engine keeps what a call took until the graph is dropped
    own = int(getattr(loaded, "planned_bytes", 0))
    del loaded
    nodes = folder.nodes(manifest, name)
    run = summary(times)
    trace = _trace_calls(engine, threads, spec, folder, running, repeat)
    parts, how = _parts(trace, nodes)
    kind = kinds(manifest)[name]
    return GraphProfile(
        name=name,
        kind=kind,
        artifact_bytes=spec.blob.size,
        macs=sum(node.macs for node in nodes.values()),
        load_ms=round(load_ms, 3),
        run=run,
        peak=PeakMemory(
            planned_bytes=spec.planned_bytes or spec.memory_budget,
            engine_bytes=trace.engine_bytes if trace else own,
            rss_bytes=max(0, peak),
        ),
        split=ops.split(parts, run, how) if kind == "step" else None,
        energy_j=joules,
        ops=ops.costliest(parts, run.median_ms, how),
    )


def summary(times: list[float]) -> CallTimes:
    """Return count, median, 90th percentile and minimum of ``times`` in milliseconds."""
    ordered = sorted(times)
    return CallTimes(
        calls=len(ordered),
        median_ms=round(statistics.median(ordered), 4),
        p90_ms=round(ordered[math.ceil(0.9 * len(ordered)) - 1], 4),
        min_ms=round(ordered[0], 4),
    )


def _time_calls(running: _RunningGraph, loaded: LoadedGraph, repeat: int) -> tuple[list[float], float | None]:
    """Return (milliseconds of each measured call, joules of one call or None if unknown) of ``repeat`` calls, after
    some that are not counted.
    """
    for _ in range(WARM):
        running.once(loaded)
    times, meter = [], open_meter()
    meter.start()
    for _ in range(repeat):
        start = time.perf_counter()
        running.once(loaded)
        times.append(1e3 * (time.perf_counter() - start))
    joules = meter.joules()
    return times, None if joules is None else joules / repeat


def _trace_calls(
    engine: Engine, threads: int, spec: Graph, folder: BundleFolder, running: _RunningGraph, repeat: int
) -> Trace | None:
    """Return the engine's trace of at most ``repeat`` calls, which run slower; None if the engine has none or the graph
    is in segments.
    """
    if spec.segments:
        return None  # each would have a trace of its own
    # Not every runtime is installed beside every engine.
    if engine.format == "onnx":
        from edgefl_device.profile.measure.onnx_trace import trace
    elif engine.format == "executorch":
        from edgefl_device.profile.measure.executorch_trace import trace
    else:
        return None
    return trace(spec, folder.get(spec.blob), threads, running.once, min(repeat, TRACED))


def _parts(told: Trace | None, nodes: dict[str, OpOrigin]) -> tuple[list[ops.TimeShare], How]:
    if told and told.instructions:
        groups = ops.by_instruction(nodes)
        return (ops.shared(told.nodes, groups), "shared") if groups else _guessed(nodes)
    if told and told.nodes:
        return ops.measured(told.nodes, nodes), "measured"
    return _guessed(nodes)


def _guessed(nodes: dict[str, OpOrigin]) -> tuple[list[ops.TimeShare], How]:
    return ops.estimated(nodes), "estimated" if nodes else ""


def state_before(
    engine: Engine, folder: BundleFolder, manifest: Manifest, spec: Graph, inputs: RandomInputs
) -> State:
    """Return the state that ``spec`` reads, made by running each earlier graph of a round once; empty if it reads none."""
    if not spec.inputs_of("state"):
        return {}
    before = [manifest.start]
    for phase in manifest.phases:
        if phase.graph == spec.name:
            break
        before.append(phase.graph)
    running = _RunningGraph({})
    for name in dict.fromkeys(before):
        earlier = manifest.graph(name)
        running.feeds = inputs.feeds(earlier)
        running.once(engine.load(earlier, folder.get(earlier.blob)))
    return running.state


def tune_bundle(
    engine: Engine, folder: BundleFolder, tuner: Autotuner, progress: Callable[[str], None] = lambda _: None
) -> dict[str, TuningResult]:
    """Measure the variants and numbers of threads of every training step that has several; replace stored results.

    Args:
        engine: Engine for the bundle's format.
        folder: The unpacked bundle.
        tuner: Measures the variants and stores the results.
        progress: Receives the name of each graph before it is measured.

    Returns:
        The result of each measured graph, by graph name.
    """
    manifest = folder.manifest
    results: dict[str, TuningResult] = {}
    steps = {phase.graph for phase in manifest.phases} | {
        bucket.graph for phase in manifest.phases for bucket in phase.shorter
    }
    for graph in manifest.graphs:
        if graph.variants or (graph.name in steps and len(engine.thread_counts) > 1):
            progress(graph.name)
            inputs = RandomInputs(manifest)
            feeds = inputs.feeds(graph)
            state = state_before(engine, folder, manifest, graph, inputs)
            result = tuner.choose(TrialStep(engine, graph, folder, feeds, state))
            if result is not None:
                results[graph.name] = result
    return results
