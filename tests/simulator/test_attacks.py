"""Dishonest clients of a simulation, and what the rules of aggregation and of rounds make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.simulate import Simulation
from edgefl.config.rounds import SimulationTable
from edgefl.simulator.trainers.local_rounds import Attack
from edgefl.wire.regions import BlockRegion, Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE, VALUE_LIMIT, Form
from tests.simulator.small import federation
from tests.support.errors import ConfigError, refuses

HOSTILE: dict[str, object] = {"hostile": ["strong-0"]}
ALIKE: dict[str, object] = {"strong": {"count": 7}}


def simulated(folder: Path, **changes: dict[str, object]) -> Simulation:
    return edgefl.simulate(federation(tiers=ALIKE, **changes), folder)


def distance(one: Simulation, other: Simulation) -> float:
    return float(np.sqrt(sum(np.square(one.model[name] - other.model[name]).sum() for name in other.model)))


@pytest.mark.slow
def test_robust_rules_leave_out_a_flipped_update(tmp_path: Path) -> None:
    hostile: dict[str, object] = {**HOSTILE, "strength": 100}
    honest = simulated(tmp_path / "honest")
    mean = distance(simulated(tmp_path / "mean", simulation=hostile), honest)
    for rule in ("median", "trimmed_mean", "multi_krum"):
        own: dict[str, object] = {"rule": rule, "trim": 0.2}
        assert distance(simulated(tmp_path / rule, simulation=hostile, aggregate=own), honest) < mean / 10
    clipped = simulated(tmp_path / "clip", simulation=hostile, aggregate={"clip_norm": 0.1})
    assert distance(clipped, honest) < mean / 10


def test_a_round_that_hostile_clients_ruin_is_undone(tmp_path: Path) -> None:
    made = simulated(
        tmp_path / "out",
        federation={"rounds": 4},
        algorithm={"lr": 0.3, "steps": 4},
        simulation={"hostile": ["strong-0"], "strength": 1e4},
        round={"rollback_loss": 1.5, "fraction": 0.3},
    )
    outcomes = [row.outcome for row in made.history]
    assert "abandoned" in outcomes and "closed" in outcomes
    losses = [row.loss for row in made.history if row.outcome == "closed" and row.loss is not None]
    assert max(losses[1:], default=0) <= 1.5 * min(losses)


@pytest.mark.slow
def test_workers_send_the_same(tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {
        "simulation": HOSTILE,
        "aggregate": {"rule": "multi_krum", "trim": 0.2},
    }
    here = simulated(tmp_path / "here", **changes)
    there = simulated(tmp_path / "there", **{**changes, "simulation": {**HOSTILE, "workers": 2}})
    assert distance(here, there) == 0.0


BASE: Arrays = {
    "w": np.arange(4, dtype=np.float32),
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.ones(2, np.float32),
}


def test_what_they_send_passes_the_checks_of_an_update() -> None:
    regions: dict[str, Region] = {**dict.fromkeys(BASE), "w": BlockRegion(((2, 3),))}
    update = {**BASE, "w": np.array([3, 3], np.float32)}

    flipped = Attack(SimulationTable(strength=10)).sent(update, BASE, regions, DENSE)
    ruined = Attack(SimulationTable(attack="statistics")).sent(update, BASE, regions, DENSE)

    assert flipped["w"].tolist() == [-8, 3] and flipped["bn.running_var"].tolist() == [1, 1]
    assert ruined["w"].tolist() == [3, 3] and ruined["bn.running_mean"].tolist() == [VALUE_LIMIT] * 2
    assert ruined["bn.running_var"].tolist() == [-VALUE_LIMIT] * 2


def test_updates_of_codes_are_not_attacked() -> None:
    with refuses(ConfigError, codec="signs"):
        Attack(SimulationTable()).sent(BASE, BASE, dict.fromkeys(BASE), Form("signs", change=True))
