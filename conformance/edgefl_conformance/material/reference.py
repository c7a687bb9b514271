"""What a round of the kit's bundles has to give: the same steps in this process, by the engine that the agent has."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache

from edgefl.wire.tensors import Array, Arrays
from edgefl_conformance.material.bundles import Material
from edgefl_device.data.samples import LocalData
from edgefl_device.engine.base import Engine
from edgefl_device.engine.select import open_engine
from edgefl_device.round import offline
from edgefl_device.round.runner import RoundResult

_ONE_AT_A_TIME = threading.Lock()


@cache
def _engine(name: str) -> Engine:
    return open_engine(name, 1)


def expected(
    material: Material,
    data: tuple[Array, Array],
    engine: str,
    *,
    seed: int,
    samples: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Arrays | None = None,
) -> RoundResult:
    """A round of ``material`` on ``data`` (x, y). ConfigError if the engine is not installed."""
    with _ONE_AT_A_TIME:
        return offline.train_round(
            material.bundle,
            material.weights,
            LocalData(*data, "the kit's data"),
            _engine(engine),
            seed=seed,
            samples=samples,
            hyper=hyper,
            carry=carry,
        )
