"""A federation that is simulated in a moment."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.api.simulate import Simulation
from edgefl.config import Federation, parse
from edgefl.simulator.results import RoundRow


def federation(**changes: dict[str, object]) -> Federation:
    tables: dict[str, dict[str, object]] = {
        "federation": {"name": "simulated", "rounds": 3},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"batch": 8, "steps": 2},
        "data": {"name": "digits", "train_samples": 120, "test_samples": 50},
        "tiers": {"strong": {"count": 4}, "weak": {"cut": 1, "count": 2}},
    }
    return parse(
        {**tables, **{key: {**tables.get(key, {}), **value} for key, value in changes.items()}},
        source="the test",
    )


def read_back(text: str) -> Federation:
    return parse(tomllib.loads(text), source="the test")


class Stopped(Exception):
    """The simulation is stopped here."""


def stop_after(number: int, chosen: Federation, out: Path, **options: Any) -> None:
    """Simulate, and stop after this round."""

    def watch(row: RoundRow) -> None:
        if row.round == number:
            raise Stopped

    with pytest.raises(Stopped):
        edgefl.simulate(chosen, out, watch=watch, **options)


def in_halves(number: int, chosen: Federation, out: Path) -> Simulation:
    """Simulate until this round, and then the rest."""
    stop_after(number, chosen, out)
    return edgefl.simulate(chosen, out, resume=True)
