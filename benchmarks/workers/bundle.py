"""Worker that steps a bundle's training graph on its engine, like a device or without the measures for memory.

``python -m benchmarks.workers.bundle BUNDLE THREADS [PLAIN]``. Plain: the graph in the file of that name, two sets of
state, onnxruntime's own settings and the C library's own thresholds. Inputs are small random numbers, and zeros
for integers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort

from benchmarks.repetition import serve
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.host import return_memory_early


class PlainEngine(OnnxEngine):
    """Engine with onnxruntime's own settings, except the threads."""

    def _options(self, threads: int = 0) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads or self._threads, 1
        options.log_severity_level = 3
        return options


def load(path: Path, threads: int, plain: Path | None) -> Callable[[], object]:
    """Load the first phase's graph; return a step on the same batch."""
    bundle = read_bundle(path)
    graph = bundle.manifest.graph(bundle.manifest.phases[0].graph)
    model = plain.read_bytes() if plain else bundle.blobs[graph.blob.sha256]
    if plain:
        ref = describe(model, Limits().chunk_bytes)
        graph = msgspec.structs.replace(graph, in_place=(), planned_bytes=0, blob=ref)
    bare = plain is not None and graph.format == OnnxEngine.format
    engine: Engine = PlainEngine(threads) if bare else open_engine(graph.format, threads)
    loaded = engine.load(graph, model)
    random = np.random.default_rng(0)
    state = engine.write_state({port.name: _filled(port, random) for port in graph.inputs_of("state")})
    feeds = {port.name: _filled(port, random) for port in graph.inputs if port.role != "state"}

    def step() -> None:
        nonlocal state
        state = {**state, **loaded.run(feeds, state).state}

    return step


def _filled(port: Port, random: np.random.Generator) -> Array:
    if not np.issubdtype(port.dtype, np.floating):
        return np.zeros(port.shape, port.dtype)
    return np.asarray(0.05 * random.random(port.shape, np.float32), port.dtype)


if __name__ == "__main__":
    other = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if other is None:
        return_memory_early()
    serve(lambda: load(Path(sys.argv[1]), int(sys.argv[2]), other))
