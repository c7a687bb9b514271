"""Options of per_fedavg: what is refused, and what a choice leaves in the algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from edgefl import algorithms
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ConfigError
from edgefl.models.spec import sequential
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import tiny
from tests.invariants.fafed.quadratic import NAME, normal, positive, quadratic, user
from tests.support.reference import federated


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta0": -1e-2}, "delta0 is -0.01"),
        ({"delta": 1e-3, "delta0": 1e-2}, "not both"),
        ({"mode": "maml"}, "mode is 'maml'; set it to one of hf, fo, exact"),
        ({"hessian_batch": "outer"}, "hessian_batch is 'outer'; set it to one of independent, inner"),
        ({"inner_steps": 0}, "inner_steps is 0"),
        ({"schedule": "cosine"}, "schedule is 'cosine'; set it to one of constant, diminishing"),
        ({"steps": -1}, "steps is -1"),
        ({"batch": 0}, "batch is 0"),
        ({"inner_batch": -2}, "inner_batch is -2"),
        ({"inner_batch": 0}, "inner_batch is 0"),
        ({"hessian_batch_size": 0}, "hessian_batch_size is 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        per_fedavg(quadratic(2), **options)


@pytest.mark.parametrize(
    ("options", "scalars"),
    [
        ({"mode": "fo"}, {"lr": 0.001, "alpha": 0.01}),
        ({"mode": "EXACT"}, {"lr": 0.001, "alpha": 0.01}),
        ({"mode": "HF"}, {"lr": 0.001, "alpha": 0.01, "delta0": 1e-4}),
        ({"delta0": 0.5}, {"lr": 0.001, "alpha": 0.01, "delta0": 0.5}),
        ({"delta": 1e-3, "alpha": 0.0}, {"lr": 0.001, "alpha": 0.0, "delta": 1e-3}),
    ],
)
def test_the_scalars_of_a_round_follow_the_mode(options: dict[str, Any], scalars: dict[str, float]) -> None:
    algorithm = per_fedavg(quadratic(2), **options)
    assert algorithm.hyper == scalars
    read = {name for each in algorithm.functions for name in each.inputs if name.startswith("hyper.")}
    assert read == {f"hyper.{name}" for name in scalars}


def test_a_diminishing_step_falls_with_the_root_of_the_round() -> None:
    """Remark G.1: beta_k = O(1 / sqrt(tau k)); the steps of one round share it."""
    algorithm = per_fedavg(quadratic(2), lr=0.4, schedule="diminishing")
    rates = [algorithm.schedule(position, 50)["lr"] for position in range(16)]
    assert rates == pytest.approx([0.4 / (k + 1) ** 0.5 for k in range(16)])
    assert per_fedavg(quadratic(2), lr=0.4).schedule(15, 50) == {}


def test_rounds_take_the_step_that_was_announced() -> None:
    """One user, one local step and alpha = 0: gradient descent on w^T A w / 2 - b^T w."""
    a, b = positive(2, seed=1), normal((2,), 2)
    options: dict[str, Any] = {"batch": 1, "steps": 1, "lr": 0.4, "alpha": 0.0, "schedule": "diminishing"}
    start = {NAME: torch.ones(2, dtype=torch.float64)}

    done = federated(per_fedavg(quadratic(2), **options), start, [user(0, a, b)], rounds=5)

    w = start[NAME]
    for k, each in enumerate(done, start=1):
        w = w - 0.4 / k**0.5 * (a @ w - b)
        assert torch.allclose(each.weights[NAME], w, rtol=0, atol=1e-13)


def test_in_float32_the_default_reach_is_larger() -> None:
    assert per_fedavg(Objective.of(OutputSide(tiny("mlp"), 0))).hyper["delta0"] == 1e-2


def test_every_batch_is_drawn_anew_and_the_server_takes_the_plain_mean() -> None:
    algorithm = per_fedavg(quadratic(2))
    assert algorithm.draws == "draw"
    assert algorithm.server.name == "mean"
    assert not algorithm.server_state
    assert not algorithm.whole


def test_unequal_batches_are_refused_beside_dropout() -> None:
    net = sequential([("net", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))])
    objective = Objective(net, TensorSpec((4,)))
    assert "noise.net.1.uniform" in per_fedavg(objective, batch=6).phases[0].function.inputs
    with pytest.raises(ConfigError, match="leave out inner_batch"):
        per_fedavg(objective, batch=6, inner_batch=3)


def test_momentum_is_no_option_of_it() -> None:
    with pytest.raises(ConfigError, match="no option 'momentum'"):
        algorithms.build("per_fedavg", quadratic(2), momentum=0.9)
