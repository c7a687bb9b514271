"""Step sizes and momentum parameters: invariant 16 of fafed.md, section 7, and the schedules of section 2.3."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.schedules import Constant, Decaying, TheorySteps
from edgefl.algorithms.adaptive.stem import stem
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError
from reproduce.fafed import theorems
from tests.invariants.fafed.tiny import GOLDEN, Bowls, X, close, whole
from tests.support.reference import federated

PAPER = TheorySteps(smoothness=2.0, devices=20, steps=10, batch=50, rho=1.0)
SMALL = TheorySteps(smoothness=3.0, devices=1, steps=1, batch=4, rho=0.5)
"""Leaves its constant phase after 1,728 iterations."""
UNLIKE = Bowls.drawn(clients=4, d=3, seed=2)
BEGIN = {X: torch.linspace(-1, 2, 3, dtype=torch.float64)}


@pytest.mark.parametrize(
    "theory", [PAPER, SMALL, TheorySteps(6.0, 3, 5, 1, 1.0), TheorySteps(0.1, 7, 2, 3, 0.01)]
)
def test_16_no_step_is_longer_than_the_theorem_allows(theory: TheorySteps) -> None:
    most = theory.rho / (12 * theory.smoothness * theory.steps)
    assert all(theory.eta(t) <= most * (1 + 1e-12) for t in (0, 1, 10, 10**3, 10**6, 10**12))


def test_16_steps_are_constant_in_the_first_phase_and_then_shrink() -> None:
    last = 1728 - 2  # t < 1728 q^3 N^2 - 3/2
    assert SMALL.eta(0) == SMALL.eta(last) == pytest.approx(0.5 / 36, rel=1e-12)
    assert SMALL.eta(last + 1) < SMALL.eta(last)
    t = 10**7
    assert SMALL.eta(t) == pytest.approx(0.5 / (3 * (t + 1.5) ** (1 / 3)), rel=1e-12)
    assert PAPER.eta(0) == PAPER.eta(690_000_000) > PAPER.eta(692_000_000)


def test_16_alpha_follows_the_step_before_and_stays_between_zero_and_one() -> None:
    for theory in (PAPER, SMALL):
        for t in (1, 2, 1_000, 1_727, 1_728, 5_000, 10**9):
            assert theory.alpha(t) == theory.c * theory.eta(t - 1) ** 2
            assert 0 < theory.alpha(t) < 1
    assert SMALL.alpha(1727) == SMALL.alpha(1) > SMALL.alpha(1729)


def test_16_closed_forms_of_the_constant_phase() -> None:
    q, n, b = 10, 20, 50
    assert PAPER.alpha(1) == pytest.approx(1 / (1728 * q**3 * n**2) + 5 / (12 * b * n * q**2), rel=1e-12)
    assert PAPER.alpha(1) == pytest.approx(4.2e-6, rel=0.01)
    assert PAPER.eta(0) == pytest.approx(1 / (12 * 2.0 * q), rel=1e-12)


@pytest.mark.parametrize(("batch", "within"), [(720, True), (721, False)])
def test_16_the_shorter_bound_of_c_holds_exactly_up_to_b_of_720_q_n(batch: int, within: bool) -> None:
    theory = TheorySteps(smoothness=1.7, devices=1, steps=1, batch=batch, rho=0.3)
    bound = 120 * 1.7**2 / (batch * 0.3**2)
    assert (theory.c <= bound * (1 + 1e-12)) is within


def test_16_numbers_of_the_counter_example() -> None:
    theory = TheorySteps(smoothness=6.0, devices=3, steps=5, batch=1, rho=1.0)
    assert theory.scale == pytest.approx(0.34668, abs=5e-6)
    assert theory.c == pytest.approx(720.0667, abs=5e-5)
    assert theory.eta(0) == pytest.approx(1 / 360, rel=1e-12)
    assert theory.alpha(1) == pytest.approx(0.00555607, abs=5e-9)


def test_16_the_server_announces_eta_and_alpha_of_an_exchange() -> None:
    made = fafed(GOLDEN.objective, batch=4, steps=3, rho=0.5, schedule="theory", smoothness=3.0, devices=1)
    theory = TheorySteps(smoothness=3.0, devices=1, steps=3, batch=4, rho=0.5)
    assert made.opening[0].hyper["eta"] == theory.eta(0)
    for completed in (1, 2, 20_000):
        announced, done = made.schedule(completed, 30_000), 3 * (completed - 1)
        for k in (1, 2, 3):
            assert announced[f"eta.{k}"] == theory.eta(done + k)
            assert announced[f"alpha.{k}"] == theory.c * theory.eta(done + k - 1) ** 2
    assert made.schedule(20_000, 30_000)["eta.3"] < made.hyper["eta.3"]


def plainly(
    eta: Callable[[int], float], alpha: Callable[[int], float], rho: float | None, q: int, rounds: int
) -> list[tuple[Tensor, Tensor]]:
    """(xbar, mbar) after every exchange on UNLIKE, as plain loops; A = 1 without ``rho``."""
    a, c = UNLIKE.a, UNLIKE.c
    previous = BEGIN[X].expand_as(a)
    m, v = (a * (previous - c)).mean(0), (a * (previous - c)).square().mean(0)

    def scale(v: Tensor) -> Tensor:
        return torch.ones_like(v) if rho is None else v.sqrt() + rho

    A = scale(v)
    found = [(BEGIN[X] - eta(0) * m / A, m)]
    x, m, v = (each.expand_as(a) for each in (found[0][0], m, v))
    for t in range(1, q * rounds + 1):
        new, old = a * (x - c), a * (previous - c)
        m, v = new + (1 - alpha(t)) * (m - old), 0.9 * v + 0.1 * new.square()
        if t % q == 0:
            m, v, A = m.mean(0).expand_as(a), v.mean(0).expand_as(a), scale(v.mean(0))
            found.append((x.mean(0) - eta(t) * m[0] / A, m[0]))
            previous, x = x, found[-1][0].expand_as(a)
        else:
            previous, x = x, x - eta(t) * m / A
    return found


def agrees(
    made: Algorithm, eta: Callable[[int], float], alpha: Callable[[int], float], rho: float | None
) -> bool:
    found = federated(made, BEGIN, UNLIKE.clients, rounds=6, feed=whole)
    wanted = plainly(eta, alpha, rho, 3, 5)
    return all(
        close(done.weights[X], x, 1e-13) and close(done.server_state[f"m/{X}"], m, 1e-13)
        for done, (x, m) in zip(found, wanted, strict=True)
    )


def test_16_stem_has_eta_and_alpha_of_every_iteration() -> None:
    made = stem(UNLIKE.objective, batch=1, steps=3, lr=0.5, schedule="original", w=8.0, sigma=2.0, c=3.0)

    def eta(t: int) -> float:
        return 0.5 / (8 + 4 * t) ** (1 / 3)

    def alpha(t: int) -> float:
        return 3 * eta(t - 1) ** 2

    assert agrees(made, eta, alpha, None)
    assert not agrees(made, eta, lambda t: alpha(1 + 3 * ((t - 1) // 3)), None), "alpha.1 for all"


def test_16_fafed_has_eta_and_alpha_of_every_iteration() -> None:
    rho, h, n = 0.5, 0.05, 4
    made = fafed(
        UNLIKE.objective, batch=1, steps=3, rho=rho, schedule="theory", smoothness=1.0, devices=n, h=h
    )
    c = 1 / (12 * 3 * h**3 * rho**2) + 60 / (n * rho**2)

    def eta(t: int) -> float:
        return rho * h / (max(1.5, 1728 * 27 * h**3 - t) + t) ** (1 / 3)

    def alpha(t: int) -> float:
        return c * eta(t - 1) ** 2

    assert alpha(15) < 0.6 * alpha(1)
    assert agrees(made, eta, alpha, rho)
    assert not agrees(made, eta, lambda t: alpha(1 + 3 * ((t - 1) // 3)), rho), "alpha.1 for all"


def test_practice_decays_by_iteration_or_by_epoch() -> None:
    by_iteration = Decaying(1.0, 0.1)
    assert by_iteration.eta(0) == 1.0
    assert by_iteration.eta(7) == pytest.approx(0.5, rel=1e-12)
    by_epoch = Decaying(20.0, 0.9, unit="epoch", epoch_steps=6)
    assert [by_epoch.eta(t) for t in (0, 1, 6)] == [20.0] * 3
    assert by_epoch.eta(7) == pytest.approx(20 / 2 ** (1 / 3), rel=1e-12)
    assert by_epoch.eta(43) == pytest.approx(10.0, rel=1e-12)  # epoch 7
    assert Constant(0.02, 0.9).eta(10**6) == 0.02


def test_the_original_schedule_of_stem_couples_alpha_to_the_step_before() -> None:
    made = stem(GOLDEN.objective, batch=1, steps=2, lr=0.5, schedule="original", w=8.0, sigma=2.0, c=3.0)
    announced = made.schedule(4, 10)  # iterations 7 and 8
    for k, t in ((1, 7), (2, 8)):
        assert announced[f"eta.{k}"] == pytest.approx(0.5 / (8 + 4 * t) ** (1 / 3), rel=1e-12)
        assert announced[f"alpha.{k}"] == pytest.approx(3 * (0.5 / (8 + 4 * (t - 1)) ** (1 / 3)) ** 2)


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (fafed, {"lr": 0.0}, "lr"),
        (fafed, {"alpha": 0.0}, "alpha"),
        (fafed, {"alpha": 1.1}, "alpha"),
        (fafed, {"beta": 1.0}, "beta"),
        (fafed, {"rho": 0.0}, "rho"),
        (fafed, {"steps": 0}, "steps"),
        (fafed, {"opening_steps": 0}, "opening_steps"),
        (fafed, {"clip": -1.0}, "clip"),
        (fafed, {"ext": 1.5}, "ext"),
        (fafed, {"schedule": "theory"}, "smoothness"),
        (fafed, {"schedule": "theory", "smoothness": -2.0, "devices": 3}, "smoothness"),
        (fafed, {"schedule": "theory", "smoothness": 1.0, "devices": 3, "h": 1e-3}, "alpha"),
        (fafed, {"schedule": "decaying", "decay_unit": "epoch"}, "epoch_steps"),
        (stem, {"schedule": "original"}, "c"),
        (stem, {"schedule": "decaying", "sigma": 0.0}, "sigma"),
    ],
)
def test_numbers_out_of_range_are_named(make, options: dict[str, object], named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=named):
        make(theorems.objective(), batch=1, **options)
