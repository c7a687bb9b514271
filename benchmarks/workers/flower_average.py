"""Worker that averages with Flower: ``PYTHON -m benchmarks.workers.flower_average FOLDER``.

PYTHON may belong to an environment of its own, as Flower asks for old releases of what we use too. FOLDER is written by
:mod:`benchmarks.aggregate`: ``job.json`` and one file of float32 for each update. The first average is written there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.repetition import serve

RESULT = "average.f32"


def load(folder: Path) -> Callable[[], object]:
    """Load the updates as lists of tensors; return a step that averages them."""
    import numpy as np
    from flwr.server.strategy.aggregate import aggregate

    job = json.loads((folder / "job.json").read_text())
    sizes = [math.prod(shape) for shape in job["shapes"]]
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    results = []
    for number, examples in enumerate(job["examples"]):
        flat = np.fromfile(folder / f"{number}.f32", np.float32)
        tensors = [
            flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), job["shapes"], strict=True)
        ]
        results.append((tensors, examples))
    target = folder / RESULT

    def step() -> None:
        average = aggregate(results)
        if not target.exists():
            np.concatenate([tensor.reshape(-1) for tensor in average]).astype(np.float32).tofile(target)

    return step


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1])))
