"""Worker that trains like a device: the device's engine, an exported graph, and no torch.

``python -m benchmarks.workers.step FOLDER THREADS``; the folder is written by
:mod:`benchmarks.graphs`.
Idle is the engine open and numpy imported, its random numbers included, and nothing loaded or run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
import numpy.random as numpy_random

from benchmarks.repetition import serve
from edgefl.wire.bundle.manifest import Graph
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_device.host import return_memory_early


def load(folder: Path, graph: Graph, engine: Engine) -> Callable[[], object]:
    """Load the graph; return a step on the next batch with new noise, whose state stays in the engine."""
    loaded = engine.load(graph, (folder / "graph.bin").read_bytes())
    with np.load(folder / "state.npz") as file:
        state = engine.write_state({name: file[name] for name in file.files})
    feeds = cycle([dict(np.load(path)) for path in sorted(folder.glob("batch*.npz"))])
    noise, random = graph.inputs_of("noise"), numpy_random.default_rng(0)

    def step() -> None:
        nonlocal state
        noise_arrays = {port.name: random.random(port.shape, np.float32) for port in noise}
        state = {**state, **loaded.run({**next(feeds), **noise_arrays}, state).state}

    return step


if __name__ == "__main__":
    return_memory_early()
    place = Path(sys.argv[1])
    wanted = msgspec.msgpack.decode((place / "graph.msgpack").read_bytes(), type=Graph)
    opened = open_engine(wanted.format, int(sys.argv[2]))
    serve(lambda: load(place, wanted, opened))
