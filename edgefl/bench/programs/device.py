"""The worker that runs a program's local step as a device does, round after round.

``python -m edgefl.bench.programs.device FOLDER GRAPH THREADS STEPS``; :mod:`edgefl.bench.programs.steps` writes the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from device_runtime.data.samples import noise
from device_runtime.engine.onnx import OnnxEngine
from device_runtime.memory import return_memory_early
from edgefl.bench.common.worker import serve
from edgefl.wire.bundle.manifest import Graph

_SEED = 0


def load(folder: Path, name: str, threads: int, steps: int) -> Callable[[], None]:
    """The step in the engine. Each call goes on from the one before; after ``steps`` of them a round begins anew, since a
    program may count its steps and have something to say about so many only."""
    graph = msgspec.msgpack.decode((folder / f"{name}.msgpack").read_bytes(), type=Graph)
    engine = OnnxEngine(threads)
    loaded = engine.load(graph, (folder / f"{name}.bin").read_bytes())
    with np.load(folder / f"{name}.npz") as file:
        inputs = {name: file[name] for name in file.files}
    begun = {port.name: inputs.pop(port.name) for port in graph.inputs_of("state")}
    state = engine.write_state(begun)
    draws = list(enumerate(graph.inputs_of("noise")))
    calls = 0

    def call() -> None:
        nonlocal state, calls
        if calls % steps == 0:
            state = engine.write_state(begun)
        calls += 1
        random = {port.name: noise(_SEED, calls, number, port.shape, port.dtype) for number, port in draws}
        state = {**state, **loaded.run({**inputs, **random}, state).state}

    return call


if __name__ == "__main__":
    return_memory_early()
    serve(lambda: load(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
