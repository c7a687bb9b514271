"""A run that needs its torch process for all: a submodel placed anew each round, a server's optimizer with a state."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.config import Federation, parse
from edgefl.wire.tensors import Arrays

TABLES: dict[str, Any] = {
    "federation": {"name": "torch", "rounds": 3, "seed": 3},
    "model": {"name": "mlp", "options": {"hidden": [6, 5]}},
    "algorithm": {"name": "tcbgd", "batch": 4, "steps": 2, "lr": 0.2},
    "optimizer": {"name": "fedadam", "options": {"lr": 0.05}},
    "data": {"name": "digits", "train_samples": 40, "test_samples": 70},
    "round": {"min_devices": 2},
    "tiers": {
        "whole": {"kind": "importance", "gamma": 1.0, "devices": ["whole-*"]},
        "half": {"kind": "importance", "gamma": 0.5, "devices": ["half-*"]},
        "third": {"kind": "importance", "gamma": 0.3, "devices": ["third-*"]},
    },
}


def federation(**changes: Any) -> Federation:
    """With these tables in place of the run's own."""
    return parse(TABLES | changes, source="the test")


def moved(weights: Arrays, seed: int) -> Arrays:
    """Other weights of the same shapes; what is kept beside them is not below what it was."""
    rng = np.random.default_rng(seed)
    noise = {name: 0.1 * rng.normal(size=array.shape) for name, array in weights.items()}
    return {
        name: (array + (np.abs(noise[name]) if "/" in name else noise[name])).astype(array.dtype)
        for name, array in weights.items()
    }


def alike(left: Arrays, right: Arrays) -> bool:
    """Bit by bit, in the same order."""
    return list(left) == list(right) and all(
        left[name].dtype == array.dtype and left[name].tobytes() == array.tobytes()
        for name, array in right.items()
    )
