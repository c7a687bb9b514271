"""Inequalities of FAFED's analysis that hold without chance: invariants 14 and 15 of fafed.md, section 7."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from tests.invariants.fafed.tiny import Bowls, Trace, X, traced

PROBLEM = Bowls.drawn(clients=5, d=4, seed=3)
START = {X: torch.full((4,), 1.5, dtype=torch.float64)}
Q, RHO, ETA, ROUNDS = 4, 0.05, 0.08, 6


@cache
def trace(alpha: float) -> Trace:
    made = fafed(PROBLEM.objective, batch=1, steps=Q, lr=ETA, alpha=alpha, beta=0.8, rho=RHO)
    return traced(made, START, PROBLEM.clients, rounds=ROUNDS)


def mean_gradient(x: Tensor) -> Tensor:
    return torch.stack([PROBLEM.gradient(i, x) for i in range(len(PROBLEM.a))]).mean(0)


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_14_the_gradient_is_bounded_by_step_and_error(alpha: float) -> None:
    found = trace(alpha)
    for t in range(1, len(found.steps)):
        A = found.steps[t - 1][0].A if t % Q else found.mean(t, lambda each: each.v).sqrt() + RHO
        here = mean_gradient(found.bar(t))
        moved = (found.bar(t + 1) - found.bar(t)).norm() / ETA
        error = (here - found.mean(t, lambda each: each.m)).norm() / RHO
        assert here.norm() <= A.max() * (moved + error) + 1e-12


def drift(found: Trace, t: int) -> float:
    return float(sum((x - found.bar(t)).square().sum() for x in found.x(t)))


def bound(found: Trace, t: int, first: int) -> float:
    """(q - 1) times the sum over s = ``first`` .. t - 1 of eta^2 |A^-1 (m_{s,i} - mbar_s)|^2 over the clients."""
    total = 0.0
    for s in range(first, t):
        mbar = found.mean(s, lambda each: each.m)
        total += sum(float((ETA * (each.m - mbar) / each.A).square().sum()) for each in found.steps[s - 1])
    return (Q - 1) * total


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_15_drift_is_bounded_from_the_last_point_where_all_were_equal(alpha: float) -> None:
    found = trace(alpha)
    for t in range(1, len(found.steps) + 1):
        assert drift(found, t) <= bound(found, t, first=(t - 1) // Q * Q + 1) + 1e-15


def test_15_the_lemma_as_printed_claims_no_drift_where_there_is_some() -> None:
    found = trace(0.1)
    wrong = [
        t for t in range(1, len(found.steps) + 1) if drift(found, t) > bound(found, t, t // Q * Q + 1) + 1e-15
    ]
    assert wrong == list(range(Q, len(found.steps) + 1, Q))
