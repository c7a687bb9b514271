"""A model of three tensors, and the ways in which an update may hold parts of it."""

from __future__ import annotations

import numpy as np

from edgefl.wire.regions import BlockRegion, EntryRegion, Region, extract
from edgefl.wire.tensors import Arrays

OLD: Arrays = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.bias": np.array([np.float32(0.1), np.float32(-7e-30), np.float32(3)]),
    "b.scale": np.array(2.5, np.float32),
}
WHOLE: dict[str, Region] = dict.fromkeys(OLD)
SUFFIX: dict[str, Region] = {"b.bias": None, "b.scale": None}
SLICE: dict[str, Region] = {"a.weight": BlockRegion((range(1, 3), (5, 0))), "b.bias": BlockRegion.leading(2)}
SINGLES: dict[str, Region] = {
    "values": EntryRegion(("b.bias", "a.weight"), np.array([0, 2, 3, 10, 11, 26])),
    "b.scale": None,
}


def drawn(rng: np.random.Generator, regions: dict[str, Region], scale: float = 1.0) -> Arrays:
    return {
        name: (rng.normal(size=local.shape) * scale).astype(np.float32)
        for name, local in extract(OLD, regions).items()
    }
