"""What holds at every iteration of FAFED: invariants 2 to 6 and 9 of fafed.md, section 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.adaptive.storm import divisor
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import state_of
from edgefl.contract.tensors import Tensors
from tests.invariants.fafed.tiny import GOLDEN, Bowls, Trace, X, at, close, traced, whole, with_start
from tests.support.reference import Client, Completed, FederationState, federated

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


def test_02_after_a_synchronisation_all_clients_are_equal() -> None:
    found = trace()
    for first in found.steps[::Q]:
        for name in ("weights", "m", "v", "scale"):
            assert equal([each.given[f"state.{name}.{X}"] for each in first])
    assert not equal(found.x(2)) and not equal(found.x(Q))


def test_03_the_preconditioner_is_constant_and_shared() -> None:
    found = trace()
    for first in range(0, len(found.steps), Q):
        assert equal([each.A for step in found.steps[first : first + Q] for each in step])
    assert not torch.equal(found.steps[0][0].A, found.steps[Q][0].A)
    assert min(float(each.A.min()) for step in found.steps for each in step) >= RHO
    assert all((each.v >= 0).all() for step in found.steps for each in step)


@pytest.mark.parametrize("schedule", ["constant", "decaying"])
def test_04_the_mean_moves_by_the_mean_estimate_at_every_iteration(schedule: str) -> None:
    found = trace(schedule=schedule)
    for t in range(1, len(found.steps)):
        expected = found.bar(t) - _eta(schedule, t) * _m(found, t) / _scale(found, t)
        assert close(found.bar(t + 1), expected, 1e-13)


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


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 1.0])
def test_06_with_exact_gradients_the_mean_estimate_is_the_mean_gradient(alpha: float) -> None:
    found = trace(alpha=alpha)
    for t in range(1, len(found.steps) + 1):
        assert close(_m(found, t), _gradient(PROBLEM, found, t), 1e-12)


def _gradient(problem: Bowls, found: Trace, t: int) -> Tensor:
    return torch.stack([problem.gradient(i, x) for i, x in enumerate(found.x(t))]).mean(0)


def test_09_the_order_of_clients_does_not_matter() -> None:
    straight, swapped = trace(), traced(algorithm(), START, PROBLEM.clients[::-1], rounds=ROUNDS)
    for one, other in zip(straight.rounds, swapped.rounds, strict=True):
        assert close(one.weights[X], other.weights[X], 1e-13)


def test_09_equal_clients_stay_equal_at_every_iteration() -> None:
    same = Bowls(PROBLEM.a[:1].expand(3, -1), PROBLEM.c[:1].expand(3, -1))
    found = trace(same)
    assert all(equal(found.x(t)) for t in range(1, (ROUNDS - 1) * Q + 1))


# -- FAFED's golden vector: two clients in two dimensions with exact gradients (fafed.md, section 7) -------


OPTIONS = {"batch": 1, "steps": 2, "lr": 0.1, "alpha": 0.1, "beta": 0.9, "rho": 0.01}


def golden_trace(**options: object) -> Trace:
    algorithm = fafed(GOLDEN.objective, **{**OPTIONS, **options})
    return traced(algorithm, at(0.5, 0.5), GOLDEN.clients, rounds=3)


def test_golden_opening() -> None:
    opening = golden_trace().rounds[0]
    assert close(opening.server_state[f"m/{X}"], (3.5, 2.25))
    assert close(opening.server_state[f"v/{X}"], (28.25, 19.125))
    assert close(opening.weights[X], (0.4342732004, 0.4486678031))


def test_golden_first_iteration() -> None:
    one, two = golden_trace().steps[0]
    assert close(one.A, (5.3250729064, 4.3832139211)) and close(two.A, (5.3250729064, 4.3832139211))
    assert close(one.x, (0.4342732004, 0.4486678031)) and torch.equal(one.x, two.x)
    assert close(one.m, (3.0342732004, 2.4196712124))
    assert close(two.m, (3.7028196011, 1.8236678031))
    assert close(one.v, (25.4570046812, 20.5703214460))
    assert close(two.v, (30.7581174126, 17.4531631585))


def test_golden_first_synchronisation() -> None:
    found = golden_trace()
    one, two = found.x(2)
    assert close(one, (0.3772923242, 0.3934646746))
    assert close(two, (0.3647376341, 0.4070620810))
    assert close(found.rounds[1].server_state[f"m/{X}"], (3.2357526132, 1.9904603898))
    assert close(found.rounds[1].server_state[f"v/{X}"], (27.8325860197, 18.7908356723))
    assert close(found.rounds[1].weights[X], (0.3097974064, 0.3544513225))
    assert close(found.steps[2][0].A, (5.2856597710, 4.3448397516))


def test_golden_second_round() -> None:
    found = golden_trace()
    assert close(found.steps[2][0].m, (2.7824116665, 2.1927468122))
    assert close(found.steps[2][1].m, (3.4567779591, 1.5795098004))
    assert close(found.x(4)[0], (0.2571566428, 0.3039834816))
    assert close(found.x(4)[1], (0.2443982300, 0.3180976273))
    assert close(found.rounds[2].server_state[f"m/{X}"], (2.9951756664, 1.7670157769))
    assert close(found.rounds[2].weights[X], (0.1932682476, 0.2696782698))
    A_4 = found.rounds[2].server_state[f"v/{X}"].sqrt() + 0.01
    assert close(A_4, (5.2081688653, 4.2720458723))


def test_golden_first_step_without_preconditioner() -> None:
    found = golden_trace(first_step="plain")
    assert close(found.rounds[0].weights[X], (0.15, 0.275))
    assert close(found.rounds[1].weights[X], (0.0454871412, 0.1992904099))


# -- inequalities of FAFED's analysis that hold without chance: invariants 14 and 15 of fafed.md, section 7 --


BOUNDS_PROBLEM = Bowls.drawn(clients=5, d=4, seed=3)
BOUNDS_START = {X: torch.full((4,), 1.5, dtype=torch.float64)}
BOUNDS_Q, BOUNDS_RHO, ETA, BOUNDS_ROUNDS = 4, 0.05, 0.08, 6


@cache
def bounds_trace(alpha: float) -> Trace:
    made = fafed(
        BOUNDS_PROBLEM.objective, batch=1, steps=BOUNDS_Q, lr=ETA, alpha=alpha, beta=0.8, rho=BOUNDS_RHO
    )
    return traced(made, BOUNDS_START, BOUNDS_PROBLEM.clients, rounds=BOUNDS_ROUNDS)


def mean_gradient(x: Tensor) -> Tensor:
    return torch.stack([BOUNDS_PROBLEM.gradient(i, x) for i in range(len(BOUNDS_PROBLEM.a))]).mean(0)


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_14_the_gradient_is_bounded_by_step_and_error(alpha: float) -> None:
    found = bounds_trace(alpha)
    for t in range(1, len(found.steps)):
        A = (
            found.steps[t - 1][0].A
            if t % BOUNDS_Q
            else found.mean(t, lambda each: each.v).sqrt() + BOUNDS_RHO
        )
        here = mean_gradient(found.bar(t))
        moved = (found.bar(t + 1) - found.bar(t)).norm() / ETA
        error = (here - found.mean(t, lambda each: each.m)).norm() / BOUNDS_RHO
        assert here.norm() <= A.max() * (moved + error) + 1e-12


def drift(found: Trace, t: int) -> float:
    return float(sum((x - found.bar(t)).square().sum() for x in found.x(t)))


def bound(found: Trace, t: int, first: int) -> float:
    """(q - 1) times the sum over s = ``first`` .. t - 1 of eta^2 |A^-1 (m_{s,i} - mbar_s)|^2 over the clients."""
    total = 0.0
    for s in range(first, t):
        mbar = found.mean(s, lambda each: each.m)
        total += sum(float((ETA * (each.m - mbar) / each.A).square().sum()) for each in found.steps[s - 1])
    return (BOUNDS_Q - 1) * total


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_15_drift_is_bounded_from_the_last_point_where_all_were_equal(alpha: float) -> None:
    found = bounds_trace(alpha)
    for t in range(1, len(found.steps) + 1):
        assert drift(found, t) <= bound(found, t, first=(t - 1) // BOUNDS_Q * BOUNDS_Q + 1) + 1e-15


# -- FAFED where it must become something simpler: invariants 7, 8, 10 and 11 of fafed.md, section 7 -------


SPECIAL_CASES_PROBLEM = Bowls.drawn(clients=4, d=5, seed=1)
COMMON = {"batch": 1, "steps": 3, "lr": 0.05, "alpha": 0.3}


def run(made: Algorithm, problem: Bowls = SPECIAL_CASES_PROBLEM, rounds: int = 4, **hyper: float) -> Trace:
    return traced(made, START, problem.clients, rounds=rounds, hyper=hyper)


def points(found: Trace) -> list[Tensor]:
    return [each.weights[X] for each in found.rounds]


# -- alpha = 1 -------------------------------------------------------------------------------------------------


def test_07_with_alpha_one_the_estimate_is_the_gradient() -> None:
    made = fafed(SPECIAL_CASES_PROBLEM.objective, **{**COMMON, "alpha": 1.0})

    def elsewhere(given: Tensors) -> Tensors:
        return made.start.fn(given | {f"carry.previous.{X}": given[f"carry.previous.{X}"] + 100})

    right, moved = run(made), run(with_start(made, elsewhere))
    for t in range(1, len(right.steps) + 1):
        for i, each in enumerate(right.steps[t - 1]):
            assert close(each.m, SPECIAL_CASES_PROBLEM.gradient(i, each.x), 1e-14)
    assert all(torch.equal(a, b) for a, b in zip(points(right), points(moved), strict=True))


def test_07_with_another_alpha_the_previous_point_matters() -> None:
    made = fafed(SPECIAL_CASES_PROBLEM.objective, **COMMON)

    def elsewhere(given: Tensors) -> Tensors:
        return made.start.fn(given | {f"carry.previous.{X}": given[f"carry.previous.{X}"] + 0.1})

    assert not close(points(run(made))[1], points(run(with_start(made, elsewhere)))[1], 1e-4)


def test_07_stem_with_alpha_one_is_federated_averaging() -> None:
    """Aligned as the algorithm is: rounds begin at x_1, x_{q+1}, ... (fafed.md 8.4)."""
    local = run(stem(SPECIAL_CASES_PROBLEM.objective, **{**COMMON, "alpha": 1.0}))
    fedavg = sgd(SPECIAL_CASES_PROBLEM.objective, batch=1, steps=3, lr=0.05, momentum=0.0, weight_decay=0.0)
    start = local.rounds[0].weights
    averaged = [
        done.weights[X]
        for done in federated(fedavg, start, SPECIAL_CASES_PROBLEM.clients, rounds=3, feed=whole)
    ]
    assert all(close(a, b, 1e-13) for a, b in zip(points(local)[1:], averaged, strict=True))


# -- one client, or one local step -----------------------------------------------------------------------------


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
    found = points(run(fafed(SPECIAL_CASES_PROBLEM.objective, **{**COMMON, "steps": 1}), rounds=13))
    expected = centralised(SPECIAL_CASES_PROBLEM, 12, refresh=1)
    assert all(close(a, b, 1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("q", [1, 2, 4])
def test_08_one_client_is_the_centralised_method(q: int) -> None:
    alone = Bowls(SPECIAL_CASES_PROBLEM.a[:1], SPECIAL_CASES_PROBLEM.c[:1])
    found = points(run(fafed(alone.objective, **{**COMMON, "steps": q}), alone, rounds=12 // q + 1))
    assert all(close(a, b, 1e-12) for a, b in zip(found, centralised(alone, 12, refresh=q)[::q], strict=True))


def test_08_for_one_client_of_stem_the_length_of_a_round_is_irrelevant() -> None:
    alone = Bowls(SPECIAL_CASES_PROBLEM.a[:1], SPECIAL_CASES_PROBLEM.c[:1])
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
    found = run(frozen(fafed(SPECIAL_CASES_PROBLEM.objective, **options)), beta=1.0, rho=1.0)
    expected = run(stem(SPECIAL_CASES_PROBLEM.objective, **options))
    assert all(torch.equal(a, b) for a, b in zip(points(found), points(expected), strict=True))
    free = run(fafed(SPECIAL_CASES_PROBLEM.objective, **options))
    assert not close(points(free)[-1], points(expected)[-1], 1e-2)


# -- scale -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1e-3, 7.0])
def test_11_without_rho_the_scale_of_the_loss_does_not_matter(k: float) -> None:
    scaled_up = Bowls(k * SPECIAL_CASES_PROBLEM.a, SPECIAL_CASES_PROBLEM.c)
    plain, other = (run(fafed(p.objective, **COMMON), p, rho=0.0) for p in (SPECIAL_CASES_PROBLEM, scaled_up))
    assert all(close(a, b, 1e-12) for a, b in zip(points(plain), points(other), strict=True))


def test_11_rho_stands_outside_the_root() -> None:
    assert abs(float(divisor(torch.tensor(0.04, dtype=torch.float64), 0.01)) - 0.21) < 1e-12
    opening = run(fafed(SPECIAL_CASES_PROBLEM.objective, **COMMON), rounds=2)
    v = opening.rounds[0].server_state[f"v/{X}"]
    assert close(opening.steps[0][0].A, v.sqrt() + 0.01, 1e-14)
    assert not close(opening.steps[0][0].A, (v + 0.01).sqrt(), 1e-3)


# -- the weight of the old gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fafed, stem])
def test_ext_multiplies_the_old_gradient_alone(make: Callable[..., Algorithm]) -> None:
    """Every m of a round against numpy; as a factor of the whole past, m - go, it is another m."""
    ext, alpha = 0.95, 0.3
    for i, each in enumerate(
        step
        for steps in run(make(SPECIAL_CASES_PROBLEM.objective, **COMMON, ext=ext)).steps
        for step in steps
    ):
        a, c = (tensor[i % 4].numpy() for tensor in (SPECIAL_CASES_PROBLEM.a, SPECIAL_CASES_PROBLEM.c))
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
    found = run(fafed(SPECIAL_CASES_PROBLEM.objective, **COMMON, clip=clip), rounds=4)
    m_0 = torch.stack([_down(SPECIAL_CASES_PROBLEM.gradient(i, START[X]), clip) for i in range(4)])
    assert close(found.rounds[0].server_state[f"m/{X}"], m_0.mean(0), 1e-14)
    assert close(found.rounds[0].server_state[f"v/{X}"], (m_0**2).mean(0), 1e-14)
    apart = 0.0
    for step in found.steps:
        for i, each in enumerate(step):
            m, v, previous = (each.given[f"state.{name}.{X}"] for name in ("m", "v", "previous"))
            new, old = SPECIAL_CASES_PROBLEM.gradient(i, each.x), SPECIAL_CASES_PROBLEM.gradient(i, previous)
            factor = min(1.0, clip / float(new.norm()))
            assert close(each.m, factor * new + 0.7 * (m - factor * old), 1e-13)
            assert close(each.v, 0.9 * v + 0.1 * (factor * new) ** 2, 1e-13)
            two = _down(new, clip) + 0.7 * (m - _down(old, clip))
            apart = max(apart, float((each.m - two).abs().max()))
    assert apart > 1e-3


def _down(grad: Tensor, clip: float) -> Tensor:
    return grad * min(1.0, clip / float(grad.norm()))


# -- A federation that is stopped at a round boundary and goes on: invariant 19 of fafed.md, section 7 -----


RESUME_PROBLEM = Bowls.drawn(clients=3, d=4, seed=6)
SAMPLES = 12
RESUME_START = {X: torch.ones(4, dtype=torch.float64)}
RESUME_OPTIONS = {"batch": 2, "steps": 3, "lr": 0.02}


def people() -> list[Client]:
    """Each with samples of its own around its problem, so that batches are random."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        each.x + 0.3 * torch.rand((SAMPLES, 2, 4), generator=generator) for each in RESUME_PROBLEM.clients
    ]
    return [Client(number, row, torch.zeros(SAMPLES, dtype=torch.float64)) for number, row in enumerate(rows)]


def resume_run(algorithm: Algorithm, rounds: int, standing: FederationState | None = None) -> list[Completed]:
    return list(federated(algorithm, RESUME_START, people(), rounds=rounds, seed=4, standing=standing))


def stands(done: Completed) -> FederationState:
    return FederationState(done.weights, done.server_state, done.carries, done.number)


def same(one: list[Completed], other: list[Completed]) -> bool:
    return all(torch.equal(a.weights[X], b.weights[X]) for a, b in zip(one, other, strict=True))


@cache
def through() -> list[Completed]:
    """Six exchanges without a stop."""
    return resume_run(fafed(RESUME_PROBLEM.objective, **RESUME_OPTIONS), 6)


@pytest.mark.parametrize("stopped", [1, 2, 4])
def test_19_a_resumed_federation_is_the_one_that_was_never_stopped(stopped: int) -> None:
    algorithm = fafed(RESUME_PROBLEM.objective, **RESUME_OPTIONS)
    assert same(through()[stopped:], resume_run(algorithm, 6, stands(through()[stopped - 1])))


def test_19_stem_and_the_naive_method_resume_as_well() -> None:
    for algorithm in (
        stem(RESUME_PROBLEM.objective, **RESUME_OPTIONS),
        naive_adaptive(RESUME_PROBLEM.objective, **RESUME_OPTIONS),
    ):
        every = resume_run(algorithm, 5)
        assert same(every[3:], resume_run(algorithm, 5, stands(every[2])))
        assert not same(every[3:], resume_run(algorithm, 5, replace(stands(every[2]), carries={})))


def test_19_the_carry_is_needed_and_good_for_one_exchange() -> None:
    for algorithm in (
        fafed(RESUME_PROBLEM.objective, **RESUME_OPTIONS),
        stem(RESUME_PROBLEM.objective, **RESUME_OPTIONS),
    ):
        assert algorithm.carry_rule.needed and algorithm.carry_rule.exchanges == 1
        assert algorithm.whole and algorithm.opening[0].whole
        assert not algorithm.opening[0].carry_rule.needed
    assert not naive_adaptive(RESUME_PROBLEM.objective, **RESUME_OPTIONS).carry_rule.needed
