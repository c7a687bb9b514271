"""What holds at every iteration of FAFED: invariants 2 to 6 and 9 of fafed.md, section 7."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from tests.invariants.fafed.tiny import (
    GOLDEN,
    Bowls,
    Trace,
    X,
    at,
    close,
    traced,
    with_old_preconditioner,
    with_own_v,
    with_start,
)

PROBLEM = Bowls.drawn(clients=4, d=5, seed=0)
START = {X: torch.linspace(-1, 2, 5, dtype=torch.float64)}
Q, RHO, BETA, ROUNDS = 3, 0.05, 0.8, 4


def algorithm(problem: Bowls = PROBLEM, **options: object) -> Algorithm:
    given = {"batch": 1, "steps": Q, "lr": 0.05, "alpha": 0.3, "beta": BETA, "rho": RHO, **options}
    return fafed(problem.objective, **given)


@cache
def trace(problem: Bowls = PROBLEM, rounds: int = ROUNDS, **options: object) -> Trace:
    return traced(algorithm(problem, **options), START, problem.clients, rounds=rounds)


def equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


@cache
def apart(private: bool = False) -> Trace:
    """Of clients that go on from their own v."""
    return traced(with_own_v(algorithm(), private=private), START, PROBLEM.clients, rounds=ROUNDS)


def is_consensus(found: Trace) -> bool:
    """Invariant 2, bit for bit at the beginning of every round."""
    return all(
        equal([each.given[f"state.{name}.{X}"] for each in first])
        for first in found.steps[::Q]
        for name in ("weights", "m", "v", "scale")
    )


def shares_its_scale(found: Trace) -> bool:
    """Invariant 3 for A: one for all clients and all iterations of a round."""
    rounds = [found.steps[first : first + Q] for first in range(0, len(found.steps), Q)]
    return all(equal([each.A for step in steps for each in step]) for steps in rounds)


def mean_moves_by_the_mean(found: Trace, schedule: str = "constant") -> bool:
    """Invariant 4: xbar_{t+1} = xbar_t - eta_t mbar_t / A_t at every t."""
    return all(
        close(found.bar(t + 1), found.bar(t) - _eta(schedule, t) * _m(found, t) / _scale(found, t), 1e-13)
        for t in range(1, len(found.steps))
    )


def test_02_after_a_synchronisation_all_clients_are_equal() -> None:
    found = trace()
    assert is_consensus(found)
    assert not equal(found.x(2)) and not equal(found.x(Q))


def test_02_fails_for_clients_that_go_on_from_their_own_v() -> None:
    assert not is_consensus(apart())


def test_03_the_preconditioner_is_constant_and_shared() -> None:
    found = trace()
    assert shares_its_scale(found)
    assert not torch.equal(found.steps[0][0].A, found.steps[Q][0].A)
    assert min(float(each.A.min()) for step in found.steps for each in step) >= RHO
    assert all((each.v >= 0).all() for step in found.steps for each in step)


@pytest.mark.parametrize("schedule", ["constant", "decaying"])
def test_04_the_mean_moves_by_the_mean_estimate_at_every_iteration(schedule: str) -> None:
    assert mean_moves_by_the_mean(trace(schedule=schedule), schedule)


def test_02_03_04_fail_for_a_private_preconditioner() -> None:
    """Each client divides by the root of its own v. What it sends is averaged, and the server's steps are FAFED's."""
    found = apart(private=True)
    assert not is_consensus(found)
    assert not shares_its_scale(found)
    assert not mean_moves_by_the_mean(found)


def test_04_fails_for_a_synchronisation_with_the_old_preconditioner() -> None:
    found = traced(with_old_preconditioner(algorithm()), START, PROBLEM.clients, rounds=ROUNDS)
    assert is_consensus(found) and shares_its_scale(found)
    assert not mean_moves_by_the_mean(found)


def _eta(schedule: str, t: int) -> float:
    return 0.05 if schedule == "constant" else 0.05 / (1 + t) ** (1 / 3)


def _m(found: Trace, t: int) -> Tensor:
    return found.mean(t, lambda each: each.m)


def _v(found: Trace, t: int) -> Tensor:
    return found.mean(t, lambda each: each.v)


def _scale(found: Trace, t: int) -> Tensor:
    """A_t: made anew at t = q, 2q, ... from the mean of v_t, which that iteration's step already uses."""
    return _v(found, t).sqrt() + RHO if t % Q == 0 else found.steps[t - 1][0].A


def test_05_the_mean_of_v_follows_the_mean_of_squared_gradients() -> None:
    found = trace()
    before = found.rounds[0].server_state[f"v/{X}"]
    for t in range(1, len(found.steps) + 1):
        squares = torch.stack([PROBLEM.gradient(i, x) ** 2 for i, x in enumerate(found.x(t))]).mean(0)
        assert close(_v(found, t), BETA * before + (1 - BETA) * squares, 1e-12)
        before = _v(found, t)


def test_05_the_first_v_is_the_mean_of_squares() -> None:
    opening = trace().rounds[0]
    grads = torch.stack([PROBLEM.gradient(i, START[X]) for i in range(4)])
    assert close(opening.server_state[f"v/{X}"], (grads**2).mean(0), 1e-12)
    assert not close(opening.server_state[f"v/{X}"], grads.mean(0) ** 2, 1e-2)


def test_05_clients_that_keep_their_own_v_have_the_same_preconditioner() -> None:
    synchronised, own = trace(), apart()
    for first in range(0, len(own.steps), Q):
        assert close(own.steps[first][0].A, synchronised.steps[first][0].A, 1e-14)
    assert not torch.equal(own.steps[Q][0].given[f"state.v.{X}"], own.steps[Q][1].given[f"state.v.{X}"])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 1.0])
def test_06_with_exact_gradients_the_mean_estimate_is_the_mean_gradient(alpha: float) -> None:
    found = trace(alpha=alpha)
    for t in range(1, len(found.steps) + 1):
        assert close(_m(found, t), _gradient(PROBLEM, found, t), 1e-12)


def _gradient(problem: Bowls, found: Trace, t: int) -> Tensor:
    return torch.stack([problem.gradient(i, x) for i, x in enumerate(found.x(t))]).mean(0)


def test_06_the_average_as_previous_point_leaves_a_residual() -> None:
    options = {"batch": 1, "steps": 2, "lr": 0.1, "alpha": 0.1, "beta": 0.9, "rho": 0.01}
    made = fafed(GOLDEN.objective, **options)
    own = traced(made, at(0.5, 0.5), GOLDEN.clients, rounds=3)
    carried = torch.stack([carry[f"previous.{X}"] for carry in own.rounds[1].carries.values()])

    def averaged(given: Tensors) -> Tensors:
        mine = given[f"carry.previous.{X}"]
        after_round_one = any(torch.equal(mine, each) for each in carried)
        return made.start.fn(given | ({f"carry.previous.{X}": carried.mean(0)} if after_round_one else {}))

    wrong = traced(with_start(made, averaged), at(0.5, 0.5), GOLDEN.clients, rounds=3)
    residual = (_m(wrong, 3) - _gradient(GOLDEN, wrong, 3)).abs().max()
    assert abs(float(residual) - 9.2e-3) < 1e-4
    assert close(_m(own, 3), _gradient(GOLDEN, own, 3), 1e-13)


def test_09_the_order_of_clients_does_not_matter() -> None:
    straight, swapped = trace(), traced(algorithm(), START, PROBLEM.clients[::-1], rounds=ROUNDS)
    for one, other in zip(straight.rounds, swapped.rounds, strict=True):
        assert close(one.weights[X], other.weights[X], 1e-13)


def test_09_equal_clients_stay_equal_at_every_iteration() -> None:
    same = Bowls(PROBLEM.a[:1].expand(3, -1), PROBLEM.c[:1].expand(3, -1))
    found = trace(same)
    assert all(equal(found.x(t)) for t in range(1, (ROUNDS - 1) * Q + 1))
