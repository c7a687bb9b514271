"""Times of the instructions of an ExecuTorch program, run one by one on a separately loaded graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from edgefl.wire.bundle.manifest import Graph
from edgefl_device.engine.base import LoadedGraph
from edgefl_device.engine.executorch import ExecuTorchEngine, ExecuTorchGraph
from edgefl_device.profile.measure.ops import NodeTime, Trace

_WARM = 1


def trace(
    graph: Graph, artifact: bytes, threads: int, run: Callable[[LoadedGraph], None], calls: int
) -> Trace:
    """Load the graph with timing, run it, and return the median time of each instruction in program order.

    Args:
        graph: The manifest's entry of the graph.
        artifact: Its bytes.
        threads: Threads of the engine.
        run: Function that runs a loaded graph once.
        calls: Measured calls, after one that is not counted.
    """
    loaded = _TimedEngine(threads).load(graph, artifact)
    for _ in range(calls + _WARM):
        run(loaded)
    times = zip(*loaded.calls[_WARM:], strict=True)
    nodes = tuple(NodeTime(str(at), "", statistics.median(seen)) for at, seen in enumerate(times))
    return Trace(nodes, loaded.planned_bytes, instructions=True)


class _TimedGraph(ExecuTorchGraph):
    """Graph that records the milliseconds of each instruction; ``calls`` has one list for each call."""

    calls: list[list[float]]

    def _call(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.calls.append(self._program.run_timed(inputs, outputs))


class _TimedEngine(ExecuTorchEngine):
    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> _TimedGraph:
        loaded = super().load(graph, artifact, threads)
        made = _TimedGraph(graph, loaded._program, loaded._inputs, loaded._outputs)
        made.calls = []
        return made
