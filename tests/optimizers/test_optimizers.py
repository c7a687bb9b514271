"""Optimizers at the server: their rules against numpy, what they leave alone, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from edgefl import algorithms, optimizers
from edgefl.contract.server import MEAN, beside, state_of
from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.algorithms.users import Users, Vector
from tests.support.reference import begun, completed

LR, BETA1, BETA2, TAU = 0.3, 0.8, 0.6, 0.05
ADAPTIVE = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU}
Second = Callable[[Vector, Vector], Vector]


def _changes(rounds: int = 8) -> Vector:
    """Some of the size of tau, some far above it, some 0, so that every branch of a rule is taken."""
    rng = np.random.default_rng(1)
    changes: Vector = rng.normal(size=(rounds, 4)) * np.array([0.05, 1.0, 3.0, 0.1])
    changes[2] = 0.0
    return changes


def _run(name: str, changes: Vector, **options: Any) -> list[Vector]:
    """x after each round from 0, where the devices' mean lies ``change`` from x."""
    optimizer = optimizers.build(name, **options)
    x = {"w": torch.zeros(4, dtype=torch.float64)}
    now: Tensors = dict(x)
    for state, value in optimizer.state.items():
        now |= beside(state, {"w": torch.full_like(x["w"], value)})
    found = []
    for change in changes:
        mean = now | {"w": now["w"] + torch.from_numpy(change)}
        now = mean | optimizer.step(now, mean, {"share": 1.0})
        found.append(now["w"].numpy())
    return found


def _adam_like(second: Second, beta1: float) -> list[Vector]:
    x, m, v, found = np.zeros(4), np.zeros(4), np.full(4, TAU**2), []
    for change in _changes():
        m, v = beta1 * m + (1 - beta1) * change, second(v, change**2)
        x = x + LR * m / (np.sqrt(v) + TAU)
        found.append(x)
    return found


@pytest.mark.parametrize(
    ("name", "second", "options"),
    [
        ("fedadam", lambda v, square: BETA2 * v + (1 - BETA2) * square, ADAPTIVE),
        ("fedyogi", lambda v, square: v - (1 - BETA2) * square * np.sign(v - square), ADAPTIVE),
        ("fedadagrad", lambda v, square: v + square, {"lr": LR, "tau": TAU, "beta1": 0.0}),
        ("fedadagrad", lambda v, square: v + square, {"lr": LR, "tau": TAU, "beta1": BETA1}),
    ],
)
def test_the_rules_of_reddi_et_al(name: str, second: Second, options: dict[str, float]) -> None:
    wanted = _adam_like(second, options["beta1"])
    np.testing.assert_allclose(_run(name, _changes(), **options), wanted, rtol=1e-12)


@pytest.mark.parametrize("variant", ["amsgrad", "max_stabilisation"])
def test_fedams_divides_by_the_largest_second_moment_so_far(variant: str) -> None:
    x, m, v = np.zeros(4), np.zeros(4), np.full(4, TAU**2)
    vhat, wanted = v, []
    for change in _changes():
        m, v = BETA1 * m + (1 - BETA1) * change, BETA2 * v + (1 - BETA2) * change**2
        vhat = np.maximum(vhat, v) if variant == "amsgrad" else np.maximum(np.maximum(vhat, v), TAU)
        x = x + LR * m / (np.sqrt(vhat) + TAU if variant == "amsgrad" else np.sqrt(vhat))
        wanted.append(x)

    np.testing.assert_allclose(_run("fedams", _changes(), **ADAPTIVE, variant=variant), wanted, rtol=1e-12)


def test_server_momentum_adds_changes_up_and_without_momentum_is_the_mean() -> None:
    m, x, wanted = np.zeros(4), np.zeros(4), []
    for change in _changes():
        m = 0.9 * m + change
        x = x + 0.5 * m
        wanted.append(x)

    np.testing.assert_allclose(_run("server_momentum", _changes(), lr=0.5, beta=0.9), wanted, rtol=1e-12)
    plain = _run("server_momentum", _changes(), lr=1.0, beta=0.0)
    np.testing.assert_allclose(plain, np.cumsum(_changes(), axis=0), rtol=1e-12, atol=1e-15)


def test_moving_statistics_become_their_mean_whatever_moves_the_weights() -> None:
    spec = build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3)
    objective = Objective.of(OutputSide(spec, 0))
    algorithm = optimizers.with_optimizer(
        algorithms.build("fedavg", objective, batch=2, steps=2, lr=0.1), "fedadam"
    )
    trained = [name for name, _ in spec.module.named_parameters()]
    before = begun(algorithm, spec.weights, trained)
    updates = [{name: tensor + k for name, tensor in spec.weights.items()} for k in (1.0, 3.0)]

    after = completed(algorithm, {**before.weights, **before.server_state}, updates, {"share": 1.0})

    statistics = [name for name in spec.weights if name not in trained]
    assert any(name.endswith("running_var") for name in statistics)
    for name in statistics:
        torch.testing.assert_close(after[name], spec.weights[name] + 2.0)
    for name in trained:
        assert not torch.allclose(after[name], spec.weights[name] + 2.0)
    assert set(state_of(after, "v")) == set(trained)


def test_what_no_device_sent_moves_by_what_is_kept_of_earlier_rounds_only() -> None:
    change = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])

    first, second = _run("fedadam", change, **ADAPTIVE)

    assert (first[:2] != 0).all() and (second[:2] > first[:2]).all()
    assert not first[2:].any() and not second[2:].any()


def test_none_leaves_an_algorithm_as_it_is() -> None:
    algorithm = algorithms.build("fedavg", Users().objective)

    assert optimizers.with_optimizer(algorithm, "none") is algorithm
    assert algorithm.server is MEAN


@pytest.mark.parametrize("algorithm", ["scaffold", "local_amsgrad", "mimeadam", "mimelite"])
def test_an_algorithm_that_says_what_the_server_does_takes_no_optimizer(algorithm: str) -> None:
    made = algorithms.build(algorithm, Users().objective)

    with pytest.raises(
        ConfigError, match=f"{algorithm!r} has a server's step of its own.*leave out optimizer"
    ):
        optimizers.with_optimizer(made, "fedadam")


def test_an_algorithm_takes_one_optimizer() -> None:
    made = optimizers.with_optimizer(algorithms.build("fedavg", Users().objective), "fedyogi")

    with pytest.raises(ConfigError, match="'fedavg' has a server's step of its own, 'fedyogi'; leave out"):
        optimizers.with_optimizer(made, "fedadam")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adam", {}, "no optimizer 'adam'; there are: none, fedadam"),
        ("none", {"lr": 1.0}, "'none' takes no options"),
        ("fedadam", {"rate": 1.0}, "no option 'rate'; it takes lr, beta1, beta2, tau"),
        ("fedadam", {"lr": "fast"}, "option 'lr' of optimizer 'fedadam' is 'fast'"),
        ("fedadam", {"lr": 0.0}, "lr is 0.0; set it to a finite number above 0"),
        ("fedyogi", {"tau": 0.0}, "tau is 0.0; set it to a finite number above 0"),
        ("fedadam", {"beta1": 1.0}, r"beta1 is 1.0; set it to a number in \[0, 1\)"),
        ("fedams", {"beta2": -0.1}, r"beta2 is -0.1; set it to a number in \[0, 1\)"),
        ("fedadagrad", {"lr": float("nan")}, "lr is nan; set it to a finite number"),
        ("fedams", {"variant": "max"}, "'variant' of optimizer 'fedams'"),
        ("server_momentum", {"beta": 1.5}, "beta is 1.5"),
    ],
)
def test_unusable_options_are_named_with_a_remedy(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizers.with_optimizer(algorithms.build("fedavg", Users().objective), name, **options)
