"""The vectors that the C++ agent's batches and noise are held against, drawn by the Python agent's code.

``python -m tests.agents.cpp.make_draws`` writes ``agents/cpp/tests/draws.json`` again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_device.data.samples import Batches, noise

FILE = Path(__file__).parents[3] / "agents" / "cpp" / "tests" / "draws.json"
LARGE = (1 << 62) + 1
BUCKETS = [0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 1]
# Fewer samples than rows, a walk that wraps around, one of many rows; draws of each of numpy's two methods.
CASES: tuple[tuple[int, int, int, str], ...] = (
    (7, 5, 8, "walk"),
    (7, 50, 32, "walk"),
    (LARGE, 11, 4, "walk"),
    ((1 << 63) - 1, 3000, 5, "walk"),
    (0, 50, 32, "draw"),
    (LARGE, 10, 10, "draw"),
    (3, 12000, 16, "draw"),
    (3, 12000, 300, "draw"),
    (5, 11, 4, "length"),
)
PLACES = ((0, 0), (0, 1), (0, 7), (1, 3))
NOISE: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (7, 0, 0, (3, 2)),
    (LARGE, 12, 1, ()),
    (9, 3, 300, (5,)),
)
_SHOWN = 24


def draws() -> dict[str, Any]:
    """Rows of batches (the first of each), and noise as the bits of its float32."""
    return {
        "buckets": BUCKETS,
        "batches": [_batch(*case) for case in CASES],
        "noise": [_noise(*case) for case in NOISE],
    }


def _batch(seed: int, samples: int, batch: int, how: Any) -> dict[str, Any]:
    buckets = np.array(BUCKETS) if how == "length" else None
    made = Batches(seed, samples, batch, how, buckets)
    rows = [made.indices(stream, step)[:_SHOWN].tolist() for stream, step in PLACES]
    # As text: many readers of JSON have doubles only.
    facts = {"seed": str(seed), "samples": samples, "batch": batch, "draws": how}
    return facts | {"places": PLACES, "rows": rows}


def _noise(seed: int, step: int, port: int, shape: tuple[int, ...]) -> dict[str, Any]:
    bits = noise(seed, step, port, shape, "float32").view(np.uint32).reshape(-1).tolist()
    return {"seed": str(seed), "step": step, "port": port, "shape": shape, "bits": bits}


def written() -> str:
    return json.dumps(draws(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
