"""edgefl's own engine: the command that anybody types, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgefl.bench.simulate.work import result
from edgefl.config import load
from edgefl.setup.data import open_data
from edgefl.simulator.folder import MODEL_NAME
from edgefl.simulator.plan import Plan
from edgefl.system.distribution import version
from edgefl.wire import tensors

FEDERATION = "federation.toml"
_OUT = "out"


def arguments(folder: Path) -> list[str]:
    """Return the arguments of Python."""
    return ["-m", "edgefl", "simulate", str(folder / FEDERATION), "--out", str(folder / _OUT), "--json"]


def found(folder: Path, moments: Sequence[float]) -> dict[str, Any]:
    """Return the result of the run in ``folder``; ``moments`` are those at which the command reported a round."""
    federation = load(folder / FEDERATION)
    each = federation.round.model_copy(update={"evaluate_every": 1})
    spec = Plan.of(federation.model_copy(update={"round": each}), open_data(federation)).spec
    assert spec.evaluate is not None
    accuracy = spec.evaluate(tensors.load((folder / _OUT / MODEL_NAME).read_bytes()))["accuracy"]
    return result(moments, accuracy, version())
