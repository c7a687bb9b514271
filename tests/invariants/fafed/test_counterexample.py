"""Three clients on which adaptive steps apart diverge: invariants 1 and 23 of fafed.md, section 7 (numbers of 2.2, 2.4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from reproduce.batched_clients import together
from reproduce.fafed import theorems
from reproduce.fafed.theorems import BETAS, ETAS, drift, naive, path, practical, theory, walked
from tests.invariants.fafed.tiny import Bowls, X, traced, whole
from tests.rings.rows import mostly_slow
from tests.support.reference import Completed, FederationState, federated

CLIENTS = theorems.clients()
START = theorems.weights()
SWEEP = {
    (beta, eta): value
    for beta, row in {
        0.1: (0.66669, 6.66687, 66.66866),
        0.5: (0.66690, 6.66901, 66.69008),
        0.9: (0.66971, 6.69714, 66.97139),
        0.99: (0.70795, 7.07954, 70.79543),
    }.items()
    for eta, value in zip((0.001, 0.01, 0.1), row, strict=True)
}
"""xbar - 10 after 2,000 iterations of Algorithm 1 at q = 5, by (beta, eta) (fafed.md 2.2)."""
LIMITS = {
    (0.1, 0.9): 1.0876,
    (0.1, 0.1): 0.5314,
    (0.03, 0.9): 0.3964,
    (0.03, 0.1): 0.1569,
    (0.01, 0.9): 0.1298,
    (0.01, 0.1): 0.0499,
    (0.003, 0.9): 0.0365,
    (0.003, 0.1): 0.0125,
}
"""Where FAFED's xbar ends by (eta, alpha), after 40,000 iterations at q = 5 (fafed.md 2.4)."""


@cache
def naive_together() -> Algorithm:
    return together(naive(), 3)


def exchanges(algorithm, rounds: int, standing: FederationState | None = None) -> list[Completed]:  # type: ignore[no-untyped-def]
    run = federated(algorithm, START, CLIENTS, rounds=rounds, feed=theorems.feed, standing=standing)
    return list(run)


# -- Algorithm 1 -----------------------------------------------------------------------------------------------


def test_01_the_naive_method_reproduces_the_table() -> None:
    v = {1: (18, 2), 2: (27, 3), 3: (31.5, 3.5), 4: (33.75, 3.75), 5: (34.875, 3.875), 6: (35.4375, 3.9375)}
    before = {
        1: (9.85857864, 10.14142136),
        2: (9.93167040, 10.16261051),
        3: (9.97872597, 10.19253497),
        4: (10.01798575, 10.22454486),
        5: (10.05409172, 10.25729192),
        6: (10.08876800, 10.29034905),
    }
    bar = (10.04714045, 10.08563047, 10.12126530, 10.15569182, 10.18955852, 10.22315536)
    for t, done in enumerate(exchanges(naive(q=1), 6), start=1):
        found = [float(done.carries[i][f"v.{theorems.NAME}"]) for i in range(3)]
        assert found == pytest.approx([v[t][0], v[t][1], v[t][1]], abs=1e-12)
        sent = [float(done.updates[i][theorems.NAME]) for i in range(3)]
        assert sent == pytest.approx([before[t][0], before[t][1], before[t][1]], abs=6e-9)
        assert float(done.weights[theorems.NAME]) == pytest.approx(bar[t - 1], abs=6e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("q", [1, 5, 10, 20])
def test_01_the_mean_moves_away_alike_for_every_length_of_a_round(q: int) -> None:
    found = path(naive(q), 100)
    for t, x in found.items():
        assert x - 10 == pytest.approx(drift(0.5, 0.1, t), abs=1e-11)
    assert found[100] == pytest.approx(13.35675014, abs=6e-9)
    assert all(0 < earlier < later for earlier, later in pairwise([10.0, *found.values()]))


def test_01_the_closed_form_has_the_sweep_of_the_spec() -> None:
    assert set(SWEEP) == set(product(BETAS, ETAS))
    for (beta, eta), value in SWEEP.items():
        assert drift(beta, eta, 2000) == pytest.approx(value, abs=6e-6)


@pytest.mark.parametrize(("beta", "eta"), [min(SWEEP), max(SWEEP)])
def test_01_the_naive_method_keeps_to_the_closed_form(beta: float, eta: float) -> None:
    found = walked(naive_together(), 50, lr=eta, beta=beta)
    assert found[50] - 10 == pytest.approx(drift(beta, eta, 50), abs=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "eta"), SWEEP)
def test_01_the_naive_method_makes_the_sweep_for_every_setting(beta: float, eta: float) -> None:
    found = walked(naive_together(), 2000, lr=eta, beta=beta)
    assert found[2000] - 10 == pytest.approx(SWEEP[beta, eta], abs=6e-6)
    assert found[2000] - 10 == pytest.approx(drift(beta, eta, 2000), abs=1e-8)
    assert found[50] - 10 == pytest.approx(drift(beta, eta, 50), abs=1e-11)


@pytest.mark.slow
def test_01_beginning_beside_the_optimum_does_not_help() -> None:
    made = together(naive(), 3)
    found = walked(made, 2000, 0.5)
    assert found[2000] == pytest.approx(67.25, abs=6e-3)
    assert walked(made, 50, -0.5) == {t: -x for t, x in found.items() if t <= 50}
    assert all(abs(walked(made, 50, x)[50]) > abs(x) for x in (0.01, 0.1, 0.9))


def test_01_a_gradient_of_zero_makes_no_step() -> None:
    still = Bowls.of([[1.0, 2.0]], [[0.5, 3.0]])
    algorithm = naive_adaptive(still.objective, batch=1, steps=2, lr=0.1, beta=0.5)
    start = {X: torch.tensor([0.5, 0.0], dtype=torch.float64)}
    (done,) = federated(algorithm, start, still.clients, rounds=1, feed=whole)
    assert float(done.weights[X][0]) == 0.5
    assert float(done.weights[X][1]) > 0


# -- FAFED -----------------------------------------------------------------------------------------------------


def test_23_first_numbers_of_fafed() -> None:
    opening, first, *_, last = exchanges(practical(lr=0.1, alpha=0.9), 21)
    assert float(opening.weights[theorems.NAME]) == pytest.approx(9.98263757, abs=6e-9)
    assert float(opening.server_state[f"v/{theorems.NAME}"]) == pytest.approx(44 / 3, abs=1e-12)
    assert float(opening.server_state[f"m/{theorems.NAME}"]) == pytest.approx(2 / 3, abs=1e-12)
    assert float(first.weights[theorems.NAME]) == pytest.approx(9.89582542, abs=6e-9)
    assert float(last.weights[theorems.NAME]) == pytest.approx(8.2463946, abs=6e-8)


def test_23_first_estimates_of_fafed() -> None:
    found = traced(practical(lr=0.1, alpha=0.9), dict(START), CLIENTS, rounds=2, feed=theorems.feed)
    m, v = ([float(getattr(each, name)) for each in found.steps[0]] for name in ("m", "v"))
    assert m == pytest.approx([5.46667, -1.73333, -1.73333], abs=6e-6)
    assert v == pytest.approx([25.3333, 9.3333, 9.3333], abs=6e-5)
    assert float(found.bar(1)) == pytest.approx(9.98263757, abs=6e-9)
    assert float(found.bar(2)) == pytest.approx(9.96527514, abs=6e-9)


def test_23_the_naive_method_leaves_and_fafed_comes() -> None:
    leaves, comes = together(naive(), 3), together(practical(), 3)
    for beta in (0.1, 0.5, 0.99):
        away, towards = walked(leaves, 30, beta=beta), walked(comes, 30, beta=beta)
        assert away[30] > away[5] > 10 > towards[5] > towards[30]


@pytest.mark.parametrize(("eta", "alpha"), mostly_slow(LIMITS, [max(LIMITS)]))
def test_23_the_bias_of_a_constant_step_shrinks_with_it(eta: float, alpha: float) -> None:
    """The whole run in plain numbers, and the algorithm itself on stretches from its beginning to its end."""
    states: dict[int, FederationState] = dict.fromkeys((0, 5_000, 39_980))  # type: ignore[arg-type]
    bars = list(scalar(40_000, states, eta=eta, rho=0.01, alpha=alpha))
    assert bars[-1] == pytest.approx(LIMITS[eta, alpha], abs=6e-5)
    for at, standing in states.items():
        for done in exchanges(practical(eta, alpha), at // 5 + 4, standing):
            expected = bars[done.number - 1]
            assert float(done.weights[theorems.NAME]) == pytest.approx(expected, rel=1e-9)


# -- full convergence ------------------------------------------------------------------------------------------


def theorys() -> dict[str, float]:
    """eta, rho and alpha of the theorem at L = 6, N = 3, q = 5, b = 1, rho = 1."""
    c = 1 / (12 * 6 * 5 * (3 ** (2 / 3) / 6) ** 3) + 60 * 36 / 3
    return {"eta": 1 / 360, "rho": 1.0, "alpha": c / 360**2}


def scalar(
    steps: int, states: dict[int, FederationState], *, eta: float, rho: float, alpha: float
) -> Iterator[float]:
    """FAFED with constant parameters as 20 lines of plain numbers: xbar after 0, 5, 10, ... iterations.

    ``states`` is filled with where the federation stands after the iterations that are its keys.
    """
    slopes, beta, keep = theorems.SLOPES, 0.5, 1 - alpha

    def slope(a: float, x: float) -> float:
        return 2 * a * (x if abs(x) <= 1 else math.copysign(1.0, x))

    start = [slope(a, 10.0) for a in slopes]
    m, v, previous = sum(start) / 3, sum(g * g for g in start) / 3, [10.0] * 3
    bar = 10.0 - eta * m / (math.sqrt(v) + rho)
    yield bar
    for t in range(0, steps, 5):
        if t in states:
            states[t] = _standing(t, bar, m, v, previous)
        A, ends = math.sqrt(v) + rho, []
        for i, a in enumerate(slopes):
            x, old, mi, vi = bar, previous[i], m, v
            for k in range(5):
                new = slope(a, x)
                mi, vi = new + keep * (mi - slope(a, old)), beta * vi + (1 - beta) * new * new
                old, x = x, x if k == 4 else x - eta * mi / A
            ends.append((x, mi, vi))
            previous[i] = x
        mean, m, v = (sum(each) / 3 for each in zip(*ends, strict=True))
        bar = mean - eta * m / (math.sqrt(v) + rho)
        yield bar


def _standing(t: int, bar: float, m: float, v: float, previous: list[float]) -> FederationState:
    def tensor(value: float) -> Tensors:
        return torch.full((1,), value, dtype=torch.float64)  # type: ignore[return-value]

    x = theorems.NAME
    carries = {i: {f"previous.{x}": tensor(value)} for i, value in enumerate(previous)}
    return FederationState({x: tensor(bar)}, {f"m/{x}": tensor(m), f"v/{x}": tensor(v)}, carries, t // 5 + 1)


def test_23_with_the_theorys_parameters_fafed_converges_fully() -> None:
    """The whole run in plain numbers, and the algorithm itself on three stretches of it."""
    states: dict[int, FederationState] = dict.fromkeys((0, 22_500, 30_000))  # type: ignore[arg-type]
    bars = list(scalar(50_000, states, **theorys()))
    assert bars[200] == pytest.approx(9.61619, abs=6e-6)
    assert bars[2_000] == pytest.approx(6.16532, abs=6e-6)
    assert bars[4_000] == pytest.approx(2.33103, abs=6e-6)
    assert bars[10_000] == pytest.approx(2.1e-20, rel=0.05)
    assert all(later < earlier for earlier, later in pairwise(bars))
    for at, standing in states.items():
        for done in exchanges(theory(), at // 5 + 7, standing):
            expected = bars[done.number - 1]
            assert float(done.weights[theorems.NAME]) == pytest.approx(expected, rel=1e-9)
