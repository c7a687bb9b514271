"""Invariant 32 of the Per-FedAvg spec: the bias of G, as its exact mean over every draw of small batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from edgefl.objective.derivatives import gradient
from tests.invariants.fafed.quadratic import (
    NAME,
    Batch,
    batches,
    direction,
    flat,
    logistic,
    normal,
    positive,
    quadratic,
    random_batch,
    random_weights,
    sample,
)

D = 3
ALPHA = 0.3


def rows(data: Batch, chosen: Sequence[int]) -> Batch:
    x, y = data
    return x[list(chosen)], y[list(chosen)]


def mean_direction(algorithm: Algorithm, w: Tensors, draws: Iterable[tuple[Batch, ...]]) -> Tensor:
    return torch.stack([flat(direction(algorithm, w, batches(*given))) for given in draws]).mean(0)


def noisy_user(count: int, *, curved: bool) -> tuple[Batch, Tensor, Tensor]:
    """Samples whose b differ, and whose A do too where ``curved``; the mean A and b."""
    matrices = [positive(D, k if curved else 0) for k in range(count)]
    vectors = [normal((D,), 20 + k) for k in range(count)]
    x = torch.cat([sample(a, b) for a, b in zip(matrices, vectors, strict=True)])
    return (
        (x, torch.zeros(count, dtype=torch.int64)),
        torch.stack(matrices).mean(0),
        torch.stack(vectors).mean(0),
    )


def bias_on_a_quadratic(*, curved: bool, hessian_batch: str) -> float:
    data, a, b = noisy_user(4, curved=curved)
    w = normal((D,), 3)
    algorithm = per_fedavg(quadratic(D), batch=1, mode="exact", alpha=ALPHA, hessian_batch=hessian_batch)
    draws = (tuple(rows(data, [k]) for k in ks) for ks in itertools.product(range(4), repeat=3))
    factor = torch.eye(D, dtype=torch.float64) - ALPHA * a
    return float((mean_direction(algorithm, {NAME: w}, draws) - factor @ factor @ (a @ w - b)).norm())


@pytest.mark.parametrize("curved", [False, True])
def test_32_exact_is_unbiased_on_a_quadratic(curved: bool) -> None:
    assert bias_on_a_quadratic(curved=curved, hessian_batch="independent") < 1e-12


def test_32_a_batch_that_serves_twice_biases_it_once_curvature_is_noisy() -> None:
    assert bias_on_a_quadratic(curved=False, hessian_batch="inner") < 1e-12
    assert bias_on_a_quadratic(curved=True, hessian_batch="inner") > 1e-4


def test_32_on_logistic_users_the_bias_shrinks_with_the_batch() -> None:
    objective, count = logistic(D), 4
    data, w = random_batch(objective, count, 1), random_weights(objective, 2, 1.5)
    noise = torch.stack([flat(gradient(objective, w, batches(rows(data, [k])))[2]) for k in range(count)])
    sigma = float((noise - noise.mean(0)).square().sum(1).mean().sqrt())
    smooth = 0.25 * float(data[0].square().sum(1).max())
    alpha = min(ALPHA, 1 / smooth)

    exact = per_fedavg(objective, batch=count, mode="exact", alpha=alpha)
    expected = flat(direction(exact, w, batches(data, data, data)))
    biases = {}
    for size in (1, 2, 3):
        algorithm = per_fedavg(objective, batch=count, inner_batch=size, mode="exact", alpha=alpha)
        draws = ((data, rows(data, ks), data) for ks in itertools.product(range(count), repeat=size))
        biases[size] = float((mean_direction(algorithm, w, draws) - expected).norm())

    assert all(bias <= 2 * alpha * smooth * sigma / size**0.5 for size, bias in biases.items())
    assert biases[1] > 1e-6
    assert biases[2] < 0.6 * biases[1]
    assert biases[3] < 0.45 * biases[1]
