"""Invariants 4, 5 and 34 of the Per-FedAvg spec: how good a quotient of gradients is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import sequential
from edgefl.objective.derivatives import difference, gradient, norm, product, shifted
from edgefl.objective.objective import Objective
from tests.invariants.fafed.quadratic import (
    Value,
    batches,
    direction,
    elu_net,
    flat,
    logistic,
    random_batch,
    random_weights,
    relative,
)
from tests.invariants.per_fedavg.wrong import TWO_BATCHES, wrong

FEATURES = 4


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype)


@dataclass(frozen=True)
class At:
    """Where a quotient is taken: an objective, weights, one batch and a vector."""

    objective: Objective
    w: Tensors
    given: Tensors
    v: Tensors

    @classmethod
    def of(cls, objective: Objective, seed: int) -> At:
        given = batches(random_batch(objective, 8, seed + 1))
        return cls(
            objective, random_weights(objective, seed), given, random_weights(objective, seed + 2, 1.0)
        )

    def central(self, delta: float) -> Tensor:
        return flat(difference(self.objective, self.w, self.given, self.v, scalar(delta)))

    def forward(self, delta: float) -> Tensor:
        ahead = gradient(self.objective, shifted(self.w, self.v, scalar(delta)), self.given)[2]
        here = gradient(self.objective, self.w, self.given)[2]
        return (flat(ahead) - flat(here)) / delta

    def exact(self) -> Tensor:
        return flat(product(self.objective, self.w, self.given, self.v))


@pytest.mark.parametrize("seed", range(3))
def test_04_halving_delta_divides_the_error_by_four(seed: int) -> None:
    at = At.of(logistic(FEATURES), seed)
    deltas = [0.1 / 2**k for k in range(5)]
    errors = [float((at.central(delta) - at.exact()).norm()) for delta in deltas]
    ratios = [larger / smaller for larger, smaller in itertools.pairwise(errors)]
    assert all(3.6 < ratio < 4.4 for ratio in ratios), ratios


def test_04_a_forward_difference_only_halves_it() -> None:
    at = At.of(logistic(FEATURES), 0)
    errors = [float((at.forward(0.02 / 2**k) - at.exact()).norm()) for k in range(5)]
    assert all(1.8 < larger / smaller < 2.2 for larger, smaller in itertools.pairwise(errors))


@pytest.mark.parametrize("form", ["delta", "delta0"])
def test_04_so_does_the_error_of_a_step(form: str) -> None:
    objective = logistic(FEATURES)
    w, given = (
        random_weights(objective, 1, 2.0),
        batches(*(random_batch(objective, 8, 2 + k) for k in range(3))),
    )
    exact = flat(direction(per_fedavg(objective, batch=8, mode="exact", alpha=0.5), w, given))

    def error(size: float) -> float:
        algorithm = per_fedavg(objective, batch=8, mode="hf", alpha=0.5, **{form: size})  # type: ignore[arg-type]
        return float((flat(direction(algorithm, w, given)) - exact).norm())

    errors = [error(0.2 / 2**k) for k in range(4)]
    assert all(3.6 < larger / smaller < 4.4 for larger, smaller in itertools.pairwise(errors)), errors


def test_the_default_reach_is_where_the_weights_type_has_most_digits() -> None:
    double, single = elu_net(), At.of(elu_net(), 0)
    assert per_fedavg(double).hyper["delta0"] == 1e-4
    at = At(
        single.objective,
        *(
            {
                name: tensor.float() if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
            for tensors in (single.w, single.given, single.v)
        ),
    )

    def error(delta0: float) -> float:
        h = scalar(delta0, torch.float32) / norm(at.v)
        found = flat(difference(at.objective, at.w, at.given, at.v, h))
        return relative(found.double(), single.exact())

    assert error(1e-2) < 1e-3
    assert error(1e-2) < error(1e-4) < error(1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_05_the_error_stays_below_half_rho_delta_v_squared(delta: float, seed: int) -> None:
    at = At.of(logistic(FEATURES), seed)
    x = at.given["batch.0.x"]
    rho = float(x.norm(dim=1).pow(3).mean()) / (6 * math.sqrt(3))  # |sigmoid''| is at most 1 / (6 sqrt 3)

    error = float((at.central(delta) - at.exact()).norm())

    assert error < 0.5 * rho * delta * float(flat(at.v).norm()) ** 2
    undivided = float((2 * at.central(delta) - at.exact()).norm())
    assert delta > 0.01 or undivided > 0.5 * rho * delta * float(flat(at.v).norm()) ** 2


class Cubic(nn.Module):
    """|w|^3 / 6 for each entry, whose Hessian is 1-Lipschitz and no better."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * self.w.abs().pow(3).sum() / 6


def test_05_the_bound_is_reached_at_a_kink_of_the_hessian() -> None:
    objective = Objective(sequential([("only", Cubic())]), TensorSpec((1,), torch.float64), Value())
    given = batches((torch.ones((1, 1), dtype=torch.float64), torch.zeros(1, dtype=torch.int64)))
    v = {"only.w": torch.tensor([3.0], dtype=torch.float64)}
    w = {"only.w": torch.zeros(1, dtype=torch.float64)}

    quotient = difference(objective, w, given, v, scalar(0.2))["only.w"]

    assert float(quotient) == pytest.approx(0.5 * 1.0 * 0.2 * 3.0**2, rel=1e-12)


def _quotients(delta: float, shared: bool) -> Tensor:
    """dt along one vector for every pair of single samples, or of one sample with itself."""
    objective = logistic(FEATURES)
    w, v = random_weights(objective, 1), random_weights(objective, 2, 0.3)
    x, y = random_batch(objective, 5, 3)
    rows = [batches((x[i : i + 1], y[i : i + 1])) for i in range(5)]
    ahead, behind = (
        [flat(gradient(objective, shifted(w, v, scalar(by)), row)[2]) for row in rows]
        for by in (delta, -delta)
    )
    pairs = [(i, i) for i in range(5)] if shared else itertools.product(range(5), repeat=2)
    return torch.stack([(ahead[i] - behind[j]) / (2 * delta) for i, j in pairs])


def _variance(values: Tensor) -> float:
    return float((values - values.mean(0)).square().sum(1).mean())


def test_34_the_variance_of_the_quotient_is_flat_in_delta() -> None:
    found = [_variance(_quotients(delta, shared=True)) for delta in (1.0, 1e-2, 1e-4)]
    assert max(found) < 1.5 * min(found)


def test_34_it_explodes_on_two_batches() -> None:
    found = [_variance(_quotients(delta, shared=False)) for delta in (1.0, 1e-2, 1e-4)]
    assert found[1] > 1e3 * found[0]
    assert found[2] > 1e3 * found[1]


def _variances(make: Callable[..., Algorithm]) -> list[float]:
    """Of the correction of a step, over all single samples as D'', for three delta: D and D' are fixed."""
    objective = logistic(FEATURES)
    w, fixed = random_weights(objective, 1), random_batch(objective, 1, 4)
    x, y = random_batch(objective, 5, 3)
    rows = [(x[i : i + 1], y[i : i + 1]) for i in range(5)]
    algorithms = [make(objective, batch=1, delta=delta, alpha=1.0) for delta in (1.0, 1e-2, 1e-4)]
    return [
        _variance(torch.stack([flat(direction(algorithm, w, batches(fixed, fixed, row))) for row in rows]))
        for algorithm in algorithms
    ]


def test_34_holds_for_the_steps_of_an_algorithm() -> None:
    found = _variances(partial(per_fedavg, mode="hf"))
    assert min(found) > 0
    assert max(found) < 1.5 * min(found)


def test_09_34_fail_for_the_steps_of_an_algorithm_that_takes_two_batches() -> None:
    found = _variances(partial(wrong, TWO_BATCHES))
    assert found[1] > 1e3 * found[0]
    assert found[2] > 1e3 * found[1]


def test_the_scale_free_reach_is_divided_by_the_norm() -> None:
    """delta0 so large that the quotient shows which h it had; the net has third derivatives (per_fedavg.md 2.8)."""
    objective, alpha, delta0 = elu_net(), 0.5, 0.5
    w = random_weights(objective, 1)
    outer, inner, hessian = (random_batch(objective, 8, seed) for seed in (2, 3, 4))
    wt = shifted(w, gradient(objective, w, batches(inner))[2], scalar(-alpha))
    gt = gradient(objective, wt, batches(outer))[2]

    def expected(h: float) -> Tensor:
        return flat(gt) - alpha * flat(difference(objective, w, batches(hessian), gt, scalar(h)))

    algorithm = per_fedavg(objective, batch=8, mode="hf", delta0=delta0, alpha=alpha)
    found = flat(direction(algorithm, w, batches(outer, inner, hessian)))
    assert relative(found, expected(delta0 / float(flat(gt).norm()))) < 1e-12
    assert relative(found, expected(delta0)) > 1e-4
    assert relative(found, expected(delta0 * float(flat(gt).norm()))) > 1e-4
