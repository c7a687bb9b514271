"""Worker that runs one graph of a round like a device: draws the noise, keeps the state, serializes updates.

``python -m benchmarks.workers.graph FOLDER GRAPH THREADS [STEPS]``; :mod:`benchmarks.encode` or
:mod:`benchmarks.algorithms` writes the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.repetition import serve
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Graph
from edgefl_device.data.samples import noise
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.host import return_memory_early
from edgefl_device.round.graph_loader import arrays_of_role

_SEED = 0


def load(folder: Path, name: str, threads: int, steps: int = 0) -> Callable[[], object]:
    """Load the graph. Each call draws new noise, keeps the state, and serializes an update if there is one.

    After ``steps`` calls the state is the initial one again, because an algorithm may count the steps of its round; 0:
    never.
    """
    graph = msgspec.msgpack.decode((folder / f"{name}.msgpack").read_bytes(), type=Graph)
    engine = OnnxEngine(threads)
    loaded = engine.load(graph, (folder / f"{name}.bin").read_bytes())
    with np.load(folder / f"{name}.npz") as file:
        inputs = {name: file[name] for name in file.files}
    ports = {port.name for port in graph.inputs_of("state")}
    initial = {name: inputs.pop(name) for name in ports}
    state = engine.write_state(initial)
    masks = {port.label: port.mask for port in graph.outputs_of("update") if port.mask}
    draws = list(enumerate(graph.inputs_of("noise")))
    calls = 0

    def call() -> bytes | None:
        nonlocal state, calls
        if steps and calls % steps == 0:
            state = engine.write_state(initial)
        calls += 1
        random = {port.name: noise(_SEED, calls, number, port.shape, port.dtype) for number, port in draws}
        outputs = loaded.run({**inputs, **random}, state)
        state = {**state, **outputs.state}
        update = arrays_of_role(outputs.arrays, "update")
        return tensors.dump(update, masks) if update else None

    return call


if __name__ == "__main__":
    return_memory_early()
    serve(lambda: load(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
