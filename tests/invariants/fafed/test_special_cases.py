"""FAFED where it must become something simpler: invariants 7, 8, 10 and 11 of fafed.md, section 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.adaptive.storm import scaled
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import state_of
from edgefl.contract.tensors import Tensors
from tests.invariants.fafed.tiny import Bowls, Trace, X, close, traced, whole, with_start
from tests.support.reference import federated

PROBLEM = Bowls.drawn(clients=4, d=5, seed=1)
START = {X: torch.linspace(-1, 2, 5, dtype=torch.float64)}
COMMON = {"batch": 1, "steps": 3, "lr": 0.05, "alpha": 0.3}


def run(made: Algorithm, problem: Bowls = PROBLEM, rounds: int = 4, **hyper: float) -> Trace:
    return traced(made, START, problem.clients, rounds=rounds, hyper=hyper)


def points(found: Trace) -> list[Tensor]:
    return [each.weights[X] for each in found.rounds]


# -- alpha = 1 -------------------------------------------------------------------------------------------------


def test_07_with_alpha_one_the_estimate_is_the_gradient() -> None:
    made = fafed(PROBLEM.objective, **{**COMMON, "alpha": 1.0})

    def elsewhere(given: Tensors) -> Tensors:
        return made.start.fn(given | {f"carry.previous.{X}": given[f"carry.previous.{X}"] + 100})

    right, moved = run(made), run(with_start(made, elsewhere))
    for t in range(1, len(right.steps) + 1):
        for i, each in enumerate(right.steps[t - 1]):
            assert close(each.m, PROBLEM.gradient(i, each.x), 1e-14)
    assert all(torch.equal(a, b) for a, b in zip(points(right), points(moved), strict=True))


def test_07_with_another_alpha_the_previous_point_matters() -> None:
    made = fafed(PROBLEM.objective, **COMMON)

    def elsewhere(given: Tensors) -> Tensors:
        return made.start.fn(given | {f"carry.previous.{X}": given[f"carry.previous.{X}"] + 0.1})

    assert not close(points(run(made))[1], points(run(with_start(made, elsewhere)))[1], 1e-4)


def test_07_stem_with_alpha_one_is_federated_averaging() -> None:
    """Aligned as the algorithm is: rounds begin at x_1, x_{q+1}, ... (fafed.md 8.4)."""
    local = run(stem(PROBLEM.objective, **{**COMMON, "alpha": 1.0}))
    fedavg = sgd(PROBLEM.objective, batch=1, steps=3, lr=0.05, momentum=0.0, weight_decay=0.0)
    start = local.rounds[0].weights
    averaged = [done.weights[X] for done in federated(fedavg, start, PROBLEM.clients, rounds=3, feed=whole)]
    assert all(close(a, b, 1e-13) for a, b in zip(points(local)[1:], averaged, strict=True))


# -- one client, or one local step -------------------------------------------------------------------------------


def centralised(problem: Bowls, iterations: int, refresh: int) -> list[Tensor]:
    """x_1, x_2, ... of the method on the averaged gradients; A is made anew every ``refresh`` iterations."""

    def grads(x: Tensor) -> Tensor:
        return torch.stack([problem.gradient(i, x) for i in range(len(problem.a))])

    previous = START[X]
    m, v = grads(previous).mean(0), (grads(previous) ** 2).mean(0)
    A = v.sqrt() + 0.01
    x = previous - 0.05 * m / A
    found = [x]
    for t in range(1, iterations + 1):
        m = grads(x).mean(0) + 0.7 * (m - grads(previous).mean(0))
        v = 0.9 * v + 0.1 * (grads(x) ** 2).mean(0)
        A = v.sqrt() + 0.01 if t % refresh == 0 else A
        previous, x = x, x - 0.05 * m / A
        found.append(x)
    return found


def test_08_one_local_step_is_the_centralised_method() -> None:
    found = points(run(fafed(PROBLEM.objective, **{**COMMON, "steps": 1}), rounds=13))
    expected = centralised(PROBLEM, 12, refresh=1)
    assert all(close(a, b, 1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("q", [1, 2, 4])
def test_08_one_client_is_the_centralised_method(q: int) -> None:
    alone = Bowls(PROBLEM.a[:1], PROBLEM.c[:1])
    found = points(run(fafed(alone.objective, **{**COMMON, "steps": q}), alone, rounds=12 // q + 1))
    assert all(close(a, b, 1e-12) for a, b in zip(found, centralised(alone, 12, refresh=q)[::q], strict=True))


def test_08_for_one_client_of_stem_the_length_of_a_round_is_irrelevant() -> None:
    alone = Bowls(PROBLEM.a[:1], PROBLEM.c[:1])
    every = points(run(stem(alone.objective, **{**COMMON, "steps": 1}), alone, rounds=13))
    third = points(run(stem(alone.objective, **{**COMMON, "steps": 3}), alone, rounds=5))
    assert all(close(a, b, 1e-14) for a, b in zip(every[::3], third, strict=True))


# -- A = 1 -----------------------------------------------------------------------------------------------------


def frozen(made: Algorithm) -> Algorithm:
    """v_0 = 0; with beta = 1 and rho = 1 announced, A is 1 for ever."""
    (opening,) = made.opening

    def nothing(update: Tensors) -> Tensors:
        return update | {f"v/{name}": torch.zeros_like(m) for name, m in state_of(update, "m").items()}

    return replace(made, opening=(replace(opening, server=replace(opening.server, unfold=nothing)),))


def test_10_with_a_preconditioner_frozen_at_one_fafed_is_stem() -> None:
    options = {**COMMON, "schedule": "decaying"}
    found = run(frozen(fafed(PROBLEM.objective, **options)), beta=1.0, rho=1.0)
    expected = run(stem(PROBLEM.objective, **options))
    assert all(torch.equal(a, b) for a, b in zip(points(found), points(expected), strict=True))
    free = run(fafed(PROBLEM.objective, **options))
    assert not close(points(free)[-1], points(expected)[-1], 1e-2)


# -- scale -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1e-3, 7.0])
def test_11_without_rho_the_scale_of_the_loss_does_not_matter(k: float) -> None:
    scaled_up = Bowls(k * PROBLEM.a, PROBLEM.c)
    plain, other = (run(fafed(p.objective, **COMMON), p, rho=0.0) for p in (PROBLEM, scaled_up))
    assert all(close(a, b, 1e-12) for a, b in zip(points(plain), points(other), strict=True))


def test_11_the_smallest_hidden_rho_breaks_it() -> None:
    small = Bowls(1e-3 * PROBLEM.a, PROBLEM.c)
    plain, other = (run(fafed(p.objective, **COMMON), p, rho=1e-8) for p in (PROBLEM, small))
    assert not close(points(plain)[-1], points(other)[-1], 1e-9)


def test_11_rho_stands_outside_the_root() -> None:
    assert abs(float(scaled(torch.tensor(0.04, dtype=torch.float64), 0.01)) - 0.21) < 1e-12
    opening = run(fafed(PROBLEM.objective, **COMMON), rounds=2)
    v = opening.rounds[0].server_state[f"v/{X}"]
    assert close(opening.steps[0][0].A, v.sqrt() + 0.01, 1e-14)
    assert not close(opening.steps[0][0].A, (v + 0.01).sqrt(), 1e-3)


# -- the weight of the old gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fafed, stem])
def test_ext_multiplies_the_old_gradient_alone(make: Callable[..., Algorithm]) -> None:
    """Every m of a round against numpy; as a factor of the whole past, m - go, it is another m."""
    ext, alpha = 0.95, 0.3
    for i, each in enumerate(
        step for steps in run(make(PROBLEM.objective, **COMMON, ext=ext)).steps for step in steps
    ):
        a, c = (tensor[i % 4].numpy() for tensor in (PROBLEM.a, PROBLEM.c))
        x, previous, m = (
            each.given[port].numpy() for port in (f"state.weights.{X}", f"state.previous.{X}", f"state.m.{X}")
        )
        new, old = a * (x - c), a * (previous - c)
        assert np.allclose(each.m.numpy(), new + (1 - alpha) * (m - ext * old), rtol=0, atol=1e-13)
        assert not np.allclose(each.m.numpy(), new + (1 - alpha) * ext * (m - old), rtol=0, atol=1e-3)


# -- clipping --------------------------------------------------------------------------------------------------


def test_clipping_takes_one_factor_from_the_new_point_for_both_gradients() -> None:
    """fafed.md 8.11; a factor for each would be another m."""
    clip = 0.5
    found = run(fafed(PROBLEM.objective, **COMMON, clip=clip), rounds=4)
    m_0 = torch.stack([_down(PROBLEM.gradient(i, START[X]), clip) for i in range(4)])
    assert close(found.rounds[0].server_state[f"m/{X}"], m_0.mean(0), 1e-14)
    assert close(found.rounds[0].server_state[f"v/{X}"], (m_0**2).mean(0), 1e-14)
    apart = 0.0
    for step in found.steps:
        for i, each in enumerate(step):
            m, v, previous = (each.given[f"state.{name}.{X}"] for name in ("m", "v", "previous"))
            new, old = PROBLEM.gradient(i, each.x), PROBLEM.gradient(i, previous)
            factor = min(1.0, clip / float(new.norm()))
            assert close(each.m, factor * new + 0.7 * (m - factor * old), 1e-13)
            assert close(each.v, 0.9 * v + 0.1 * (factor * new) ** 2, 1e-13)
            two = _down(new, clip) + 0.7 * (m - _down(old, clip))
            apart = max(apart, float((each.m - two).abs().max()))
    assert apart > 1e-3


def _down(grad: Tensor, clip: float) -> Tensor:
    return grad * min(1.0, clip / float(grad.norm()))
