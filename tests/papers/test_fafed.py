"""FAFED's entries: runs are measured and judged as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.federation import load_federation
from edgefl.api.simulate import Simulation
from reproduce.batched_clients import together
from reproduce.fafed import speedup
from reproduce.fafed.federations import FAFED, FEDAVG, METHODS, Options, Setup, Tuned
from reproduce.fafed.measures import (
    GRADIENTS,
    MEGABYTES,
    OBJECTIVE,
    against,
    dearer,
    gradients,
    lowest,
    measured,
    none_above,
    rises,
    sends,
    smoother,
)
from reproduce.results import Results

DIGITS: Options = {"name": "digits", "train_samples": 400, "test_samples": 100}
TINY = Setup(
    clients=2,
    rounds=4,
    batch=10,
    steps=3,
    model={"name": "mlp", "options": {"hidden": [8]}},
    data=DIGITS,
    looked_at=100,
)


def _simulated(name: str, tuned: Tuned, out: Path) -> Simulation:
    settings = TINY.method(name, tuned)
    return edgefl.simulate(load_federation(None, {**settings, "federation.seed": 1}), out / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Simulation]:
    out = tmp_path_factory.mktemp("runs")
    tuned = {FAFED: Tuned({"lr": 0.01, "alpha": 0.9}), FEDAVG: Tuned({"lr": 0.1})}
    return {name: _simulated(name, each, out) for name, each in tuned.items()}


@pytest.mark.slow
def test_a_run_tells_its_training_loss_and_what_it_cost(runs: Mapping[str, Simulation]) -> None:
    found = {name: measured(TINY.looked_at)(run) for name, run in runs.items()}

    for each in found.values():
        assert [number for number, _ in each.lines[OBJECTIVE]] == [1, 2, 3, 4]
        assert each.figures[OBJECTIVE] == each.lines[OBJECTIVE][-1][1] < math.log(10)
        assert each.figures[MEGABYTES] == pytest.approx(each.figures["up_mb"] + each.figures["down_mb"])
    assert 3 < found[FAFED].figures["floats_up"] < 3.5 and 1 < found[FEDAVG].figures["floats_up"] < 1.5
    # Of the opening exchange one gradient a sample, of each later step two.
    assert gradients(runs[FAFED]) == [60, 120, 120, 120] and gradients(runs[FEDAVG]) == [60] * 4
    assert found[FAFED].lines[GRADIENTS][-1] == (4, 0.42)


def test_training_loss_is_of_training_samples(runs: Mapping[str, Simulation]) -> None:
    run = runs[FEDAVG]
    whole = measured(0)(run).lines[OBJECTIVE][-1][1]
    assert whole != pytest.approx(run.history[-1].loss, abs=1e-6)
    assert whole == pytest.approx(measured(100)(run).lines[OBJECTIVE][-1][1], rel=0.2)


def test_every_method_has_settings() -> None:
    assert len({str(TINY.method(name, Tuned({"lr": 0.1}))) for name in METHODS}) == len(METHODS)


def test_rises_are_what_goes_up() -> None:
    assert rises([3.0, 2.0, 2.5, 1.0, 1.25]) == 0.75 and rises([2.0, 1.0]) == 0


def test_judges_say_who_is_ahead_and_at_what_cost() -> None:
    results = Results(
        [0, 1],
        {
            "a": [{"x": 0.3, "floats_up": 3.0}, {"x": 0.4, "floats_up": 3.0}],
            "b": [{"x": 0.5, "floats_up": 1.0}, {"x": 0.45, "floats_up": 1.0}],
        },
        {
            "a": [{OBJECTIVE: [(2, 0.9), (4, 0.2)], "cost": [(1, 3), (2, 6), (3, 9), (4, 12)]}] * 2,
            "b": [{OBJECTIVE: [(2, 0.8), (4, 0.6)], "cost": [(1, 2), (2, 4), (3, 6), (4, 8)]}] * 2,
        },
    )
    assert lowest("a", ("b",), "x")(results).held and not lowest("b", ("a",), "x")(results).held
    assert none_above(("a",), "b", "x")(results).held and not none_above(("b",), "a", "x")(results).held
    assert smoother({"a": ("b",)}, "x")(results).held
    assert sends({"a": 3.0, "b": 1.0})(results).held and not sends({"a": 2.0})(results).held
    # For 8 units `a` affords two rounds, and is then behind.
    judged = dearer({"a": "b"}, ("cost",))(results)
    assert judged.held and "rounds +0.4000" in judged.ours and "cost -0.3000" in judged.ours
    assert against(results, ("b",), "cost") == {"b": [(4, 0.8), (8, 0.6)]}


@pytest.mark.slow
def test_more_clients_reach_a_smaller_error() -> None:
    size = speedup.Size(clients=(1, 4), alphas=(0.05,), errors=(0.01,), iterations=500)
    ends = [
        speedup.mean_gradient(together(speedup.algorithm(0.05), clients), clients, size, seed=0)[-1]
        for clients in size.clients
    ]
    assert ends[1] < 0.7 * ends[0]


def test_slopes_are_of_logarithms() -> None:
    size = speedup.Size(clients=(1, 2, 4), alphas=(), errors=(0.4, 0.2), iterations=0)
    figures = {
        f"iterations, N={n}, eps={eps:g}": 8 / (n * eps**3) for n in size.clients for eps in size.errors
    }
    slopes = speedup.slopes(figures, size)
    assert slopes[speedup.SLOPE_CLIENTS] == pytest.approx(-1)
    assert slopes[speedup.SLOPE_ERROR] == pytest.approx(-3)
    assert speedup.first_below(np.array([0.5, 0.3, 0.1]), 0.3) == 2 * speedup.STEPS
    assert speedup.first_below(np.array([0.5]), 0.3) is None
