"""Invariants 20 to 23 of the Per-FedAvg spec, golden numbers included: where the rounds lead to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.baselines.fedavg import fedavg
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from tests.invariants.fafed.quadratic import NAME, normal, positive, quadratic, user
from tests.invariants.per_fedavg.wrong import FROM_ADAPTED, WRONG, wrong
from tests.rings.rows import mostly_slow
from tests.support.reference import Client, federated

POWER = {"fedavg": 0, "fo": 1, "exact": 2, "hf": 2}


def algorithm_of(method: str, dimension: int, *, steps: int, lr: float, alpha: float) -> Algorithm:
    objective = quadratic(dimension)
    if method == "fedavg":
        return fedavg(objective, batch=1, steps=steps, lr=lr)
    if method in POWER:
        return per_fedavg(objective, batch=1, steps=steps, lr=lr, alpha=alpha, mode=method)
    return wrong(method, objective, batch=1, steps=steps, lr=lr, alpha=alpha)


def led_to(algorithm: Algorithm, clients: Sequence[Client], start: Tensor, rounds: int) -> Tensor:
    *_, last = federated(algorithm, {NAME: start}, clients, rounds=rounds)
    return last.weights[NAME]


def of(client: Client) -> tuple[Tensor, Tensor]:
    return client.x[0, :, :-1], client.x[0, :, -1]


def fixed_point(clients: Sequence[Client], power: int, steps: int, lr: float, alpha: float) -> Tensor:
    """``(sum_i (I - M_i^tau))^{-1} sum_i (I - M_i^tau) A_i^{-1} b_i``, M_i = I - beta (I - alpha A_i)^p A_i."""
    left, right = 0.0, 0.0
    for a, b in map(of, clients):
        eye = torch.eye(len(b), dtype=torch.float64)
        m = eye - lr * torch.linalg.matrix_power(eye - alpha * a, power) @ a
        moved = eye - torch.linalg.matrix_power(m, steps)
        left, right = left + moved, right + moved @ torch.linalg.solve(a, b)
    return torch.linalg.solve(left, right)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", POWER)
@pytest.mark.parametrize(("steps", "rounds"), mostly_slow([(1, 40), (5, 9)], [(5, 9)]))
def test_20_rounds_lead_to_the_fixed_point_of_the_formula(method: str, steps: int, rounds: int) -> None:
    clients = [user(i, positive(3, i, 0.7, 2.0), normal((3,), 50 + i)) for i in range(2)]
    setting = {"steps": steps, "lr": 0.8, "alpha": 0.1}

    found = led_to(algorithm_of(method, 3, **setting), clients, torch.zeros(3, dtype=torch.float64), rounds)

    assert (found - fixed_point(clients, POWER[method], **setting)).abs().max() < 1e-9
    others = {p for p in (0, 1, 2) if p != POWER[method]}
    assert all((found - fixed_point(clients, p, **setting)).abs().max() > 1e-4 for p in others)


def two_users() -> list[Client]:
    """f_1 = w^2 / 2 and f_2 = 2 (w - 1)^2: A = 1, 4 and minimisers 0, 1."""
    return [
        user(i, torch.tensor([[a]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64))
        for i, (a, b) in enumerate([(1.0, 0.0), (4.0, 4.0)])
    ]


@functools.cache
def led_two(method: str, rounds: int = 32) -> float:
    start = torch.tensor([5.0], dtype=torch.float64)
    return float(led_to(algorithm_of(method, 1, steps=1, lr=0.5, alpha=0.1), two_users(), start, rounds))


GOLDEN = {"fedavg": 0.8, "fo": 8 / 11, "exact": 0.64, "hf": 0.64}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", GOLDEN)
def test_21_two_scalar_users(method: str) -> None:
    assert abs(led_two(method) - GOLDEN[method]) < 1e-9


# In one dimension "entry by entry" is right; invariants 3 and 11 catch it.
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [kind for kind in (*WRONG, FROM_ADAPTED) if "entry" not in kind])
def test_21_wrong_variants_end_elsewhere(kind: str) -> None:
    assert abs(led_two("hf", 12) - GOLDEN["hf"]) < 1e-3
    assert not abs(led_two(kind, 12) - GOLDEN["hf"]) < 1e-3


def meta_loss(w: Tensor, alpha: float = 0.1) -> Tensor:
    """F of the two users."""
    losses = []
    for a, b in map(of, two_users()):
        adapted = w - alpha * (a @ w - b)
        losses.append(adapted @ a @ adapted / 2 - b @ adapted)
    return torch.stack(losses).mean()


def test_22_only_the_second_order_point_is_stationary_for_the_meta_loss() -> None:
    points = {method: torch.tensor([led_two(method)], dtype=torch.float64) for method in GOLDEN}
    slopes = {method: float(torch.func.grad(meta_loss)(w).norm()) for method, w in points.items()}
    assert slopes["exact"] < 1e-9
    assert slopes["hf"] < 1e-9
    assert slopes["fo"] > 1e-2
    assert slopes["fedavg"] > 1e-2
    for method in ("exact", "hf"):
        assert meta_loss(points[method]) < meta_loss(points["fo"]) < meta_loss(points["fedavg"])


def _after_200_steps(method: str) -> float:
    clients = [user(0, torch.tensor([[3.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    algorithm = algorithm_of(method, 1, steps=200, lr=0.05, alpha=0.5)
    return float(led_to(algorithm, clients, torch.ones(1, dtype=torch.float64), 1))


@pytest.mark.parametrize(
    ("method", "expected"),
    mostly_slow([("fo", 1.9e6), ("exact", 4.8e-4), ("hf", 4.8e-4)], [("fo", 1.9e6), ("exact", 4.8e-4)]),
)
def test_23_first_order_ascends_where_the_inner_step_overshoots(method: str, expected: float) -> None:
    assert _after_200_steps(method) == pytest.approx(expected, rel=0.01)
