"""``python -m tests.fuzz.loaders SEED COUNT``: damaged graphs into ONNX Runtime, in a process that may die of it.
``python -m tests.fuzz.loaders SEED COUNT executorch``: damaged programs into ExecuTorch, whose own process dies of some.

Prints how many were refused and how many ran. Ends with a traceback for any exception that is none of ours.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.fuzz_messages import mutated
from edgefl.errors import EdgeflError
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.limits import Limits
from edgefl_device.engine.base import Engine
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.sandbox.process import open_sandboxed
from tests.device_runtime import tiny

Made = Sequence[tuple[Graph, bytes]]


def run(engine: Engine, made: Made, seed: int, count: int) -> dict[str, int]:
    """Load and run ``count`` damaged artifacts; errors of ours are counted, others end it."""
    rng, outcomes = random.Random(seed), {"refused": 0, "ran": 0}
    artifacts = [data for _, data in made]
    for _ in range(count):
        graph, data = rng.choice(made)
        try:
            loaded = engine.load(graph, mutated(rng, data, artifacts))
            state = engine.write_state(
                {port.name: np.zeros(port.shape, port.dtype) for port in graph.inputs_of("state")}
            )
            feeds = {
                port.name: np.zeros(port.shape, port.dtype) for port in graph.inputs if port.role != "state"
            }
            loaded.run(feeds, state)
            outcomes["ran"] += 1
        except EdgeflError:
            outcomes["refused"] += 1
    return outcomes


def onnx(seed: int, count: int) -> dict[str, int]:
    made = [tiny.start(), tiny.train(), tiny.finish(), tiny.coded_finish(), tiny.forward("stem")]
    return run(OnnxEngine(), made, seed, count)


def executorch(seed: int, count: int) -> dict[str, int]:
    """As a device loads what no key vouches for, if it loads it at all: in a process of the engine's own."""
    from tests.device_runtime.tiny_pte import make_bundle

    bundle = make_bundle(delegated=True)
    made = [(graph, bundle.blobs[graph.blob.sha256]) for graph in bundle.manifest.graphs]
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(max_step_s=5.0)
        engine = open_sandboxed("executorch", 1, 0, pages=Path(folder), memory_bytes=1 << 28, limits=limits)
        try:
            return run(engine, made, seed, count)
        finally:
            engine.rest()


def main(arguments: Sequence[str]) -> None:
    seed, count, *which = arguments
    found = executorch(int(seed), int(count)) if which == ["executorch"] else onnx(int(seed), int(count))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
