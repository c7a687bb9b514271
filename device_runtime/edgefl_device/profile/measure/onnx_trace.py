"""Trace of a graph by ONNX Runtime's profiler: time of each node, and memory of the arena."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgefl.wire.bundle.manifest import Graph
from edgefl_device.engine.base import LoadedGraph
from edgefl_device.engine.onnx import OnnxEngine, OnnxGraph
from edgefl_device.profile.measure.ops import NodeTime, Trace

_KERNEL = "_kernel_time"
_WARM = 1
_WITH_BODY = frozenset({"Scan", "Loop", "If"})
"""Ops that run a graph of their own. Its nodes are listed too, and their time is that of the op already."""


def trace(
    graph: Graph, artifact: bytes, threads: int, run: Callable[[LoadedGraph], None], calls: int
) -> Trace:
    """Load the graph with ONNX Runtime's profiler, run it, and return the median time of each node.

    Args:
        graph: The manifest's entry of the graph.
        artifact: Bytes of the ONNX model.
        threads: Threads of the engine.
        run: Function that runs a loaded graph once.
        calls: Measured calls, after one that is not counted.
    """
    with _temporary_prefix() as begin:
        loaded = _ProfilingEngine(threads, begin).load(graph, artifact)
        for _ in range(calls + _WARM):
            run(loaded)
        return read(json.loads(loaded.end_profiling().read_text()), calls)


@contextmanager
def _temporary_prefix() -> Iterator[Path]:
    """Yield a path prefix for the profiler's files, and delete them at the end. A confined process cannot create a
    folder.
    """
    handle, name = tempfile.mkstemp(prefix="edgefl-trace-")
    os.close(handle)
    begin = Path(name)
    try:
        yield begin
    finally:
        for file in begin.parent.glob(f"{begin.name}*"):
            file.unlink(missing_ok=True)


def read(events: Iterable[Mapping[str, Any]], calls: int) -> Trace:
    """Return the median time of each node from the profiler's events.

    Nodes in the body of a loop or condition are left out, because its own time contains theirs.

    Args:
        events: Events of ``calls`` calls and one warm-up call before them.
        calls: Number of measured calls.
    """
    kernels = [
        event
        for event in events
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_KERNEL)
    ]
    times: dict[str, list[float]] = {}
    ops: dict[str, str] = {}
    for event in _outermost(kernels):
        name = str(event["name"]).removesuffix(_KERNEL)
        times.setdefault(name, []).append(float(event.get("dur", 0)) / 1e3)
        ops[name] = _op(event) or name
    nodes = tuple(NodeTime(name, ops[name], _median_per_call(seen, calls)) for name, seen in times.items())
    return Trace(nodes, max(map(_held, kernels), default=0))


def _outermost(kernels: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield those of the nodes' profiler events ``kernels`` that do not begin inside a node with a body, such as a
    loop. Nodes run sequentially.
    """
    body_ends = -math.inf
    for event in sorted(kernels, key=lambda each: (each.get("ts", 0), -each.get("dur", 0))):
        began = event.get("ts", 0)
        if began >= body_ends:
            yield event
            if _op(event) in _WITH_BODY:
                body_ends = began + event.get("dur", 0)


def _op(event: Mapping[str, Any]) -> str:
    return str(event.get("args", {}).get("op_name", ""))


def _held(event: Mapping[str, Any]) -> int:
    args = event.get("args", {})
    return int(args.get("mem_arena_held", args.get("mem_in_use_peak", 0)))


def _median_per_call(seen: list[float], calls: int) -> float:
    """Return the median milliseconds of a node per call, from the times of all its runs.

    A node may run several times in each call, as in a loop's body.
    """
    each = len(seen) // (calls + _WARM) or 1
    times = sorted(sum(seen[start : start + each]) for start in range(each * _WARM, len(seen), each))
    return times[len(times) // 2] if times else sum(seen)


class _ProfiledGraph(OnnxGraph):
    def end_profiling(self) -> Path:
        """Stop profiling; return the file with all events since the session began."""
        return Path(self._session.end_profiling())


class _ProfilingEngine(OnnxEngine):
    """ONNX engine whose sessions are those of training, with the profiler enabled."""

    def __init__(self, threads: int, prefix: Path) -> None:
        super().__init__(threads)
        self._prefix = prefix

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> _ProfiledGraph:
        return _ProfiledGraph(graph, self._loaded(graph, artifact, self._options(threads))._session)

    def _options(self, threads: int = 0) -> Any:
        options = super()._options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(self._prefix)
        return options
