"""``python -m tests.fuzz.loaders SEED COUNT``: damaged graphs into ONNX Runtime, in a process that may die of it.

Prints how many were refused and how many ran. Ends with a traceback for any exception that is none of ours.
"""

from __future__ import annotations

import json
import random
import sys

import numpy as np

from device_runtime.engine.onnx import OnnxEngine
from edgefl.bench.fuzz.mutate import mutated
from edgefl.wire.errors import EdgeflError
from tests.device_runtime import tiny


def main(seed: int, count: int) -> None:
    rng, engine = random.Random(seed), OnnxEngine()
    made = [tiny.start(), tiny.train(), tiny.finish(), tiny.coded_finish(), tiny.forward("stem")]
    artifacts, outcomes = [data for _, data in made], {"refused": 0, "ran": 0}
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
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
