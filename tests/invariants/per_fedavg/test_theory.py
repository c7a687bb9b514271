"""Per-FedAvg invariants 18, 19 and 31: the server's mean, the sampling of users, and the constants of the theory."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.analysis.heterogeneity.theory import (
    LossConstants,
    TrainingSetting,
    alpha_max,
    beta_max,
    bias,
    bound,
    drift,
    gamma_f2,
    m_fo,
    m_hf,
    s_fo2,
    s_hf2,
    sampling_factor,
    sigma_f2,
    sigma_t2,
    smoothness,
)
from tests.invariants.fafed.quadratic import NAME, normal, positive, quadratic, sample
from tests.support.errors import ConfigError, refuses
from tests.support.reference import Client, federated, selection

D = 3
ONES = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
PAPER = TrainingSetting(alpha=0.1, beta=1e-3, tau=10, delta=1e-3, fraction=0.2, users=50)


def users_of_unequal_size(count: int) -> list[Client]:
    """User i has 1 + 3 i samples of its own quadratic, all the same."""
    made = []
    for number in range(count):
        rows = sample(positive(D, number), normal((D,), 50 + number)).expand(1 + 3 * number, -1, -1)
        made.append(Client(number, rows, torch.zeros(len(rows), dtype=torch.int64)))
    return made


def test_18_the_server_s_mean_does_not_count_samples() -> None:
    algorithm = per_fedavg(quadratic(D), batch=2, steps=2, lr=0.1, alpha=0.1, mode="exact")
    clients, w = users_of_unequal_size(4), {NAME: normal((D,), 9)}
    (done,) = federated(algorithm, w, clients, rounds=1)
    updates = torch.stack([done.updates[client.number][NAME] for client in clients])
    sizes = torch.tensor([float(len(client.x)) for client in clients], dtype=torch.float64)
    weighted = (sizes[:, None] * updates).sum(0) / sizes.sum()
    assert torch.allclose(done.weights[NAME], updates.mean(0), rtol=0, atol=1e-14)
    assert not torch.allclose(done.weights[NAME], weighted, rtol=0, atol=1e-3)


def test_18_the_order_of_the_users_does_not_matter() -> None:
    algorithm = per_fedavg(quadratic(D), batch=2, steps=2, lr=0.1, alpha=0.1, mode="exact")
    clients, w = users_of_unequal_size(5), {NAME: normal((D,), 9)}
    forward, backward = (
        list(federated(algorithm, w, order, rounds=3))[-1] for order in (clients, clients[::-1])
    )
    assert torch.allclose(forward.weights[NAME], backward.weights[NAME], rtol=0, atol=1e-14)


def test_18_a_round_takes_r_n_users_without_replacement() -> None:
    algorithm = per_fedavg(quadratic(D), batch=2, steps=1, lr=0.1, alpha=0.1, mode="fo")
    clients, w = users_of_unequal_size(10), {NAME: normal((D,), 9)}
    taken = [done.selected for done in federated(algorithm, w, clients, rounds=20, fraction=0.5)]
    assert all(len(set(chosen)) == len(chosen) == 5 for chosen in taken)
    assert len(set(taken)) > 1 and set().union(*taken) == set(range(10))


@pytest.mark.parametrize("fraction", [0.25, 0.15, Fraction(1, 3), 0.0, 1.1])
def test_18_a_fraction_that_is_no_whole_number_of_users_is_refused(fraction: float | Fraction) -> None:
    algorithm = per_fedavg(quadratic(D), batch=2, steps=1, lr=0.1, alpha=0.1, mode="fo")
    clients, w = users_of_unequal_size(10), {NAME: normal((D,), 9)}
    with pytest.raises(ConfigError, match="whole number"):
        list(federated(algorithm, w, clients, rounds=1, fraction=fraction))


def variance_ratio(clients: int, count: int, rounds: int) -> tuple[float, float]:
    """Mean squared distance of a sampled mean from the mean, over the numbers' variance, and its standard error."""
    numbers = np.random.default_rng(1).normal(size=clients) ** 2
    chosen = [selection(0, number, clients, count) for number in range(1, rounds + 1)]
    squares = np.array([(numbers[rows].mean() - numbers.mean()) ** 2 for rows in chosen]) / numbers.var()
    return float(squares.mean()), float(squares.std() / math.sqrt(rounds))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("clients", "count"), [(10, 4), (50, 10), (6, 6), (5, 1)])
def test_19_the_variance_of_a_sampled_mean(clients: int, count: int) -> None:
    found, error = variance_ratio(clients, count, 3000)
    assert abs(found - sampling_factor(count / clients, clients)) <= 3 * error + 1e-12


def test_31_the_constants_at_the_spec_s_regression_point() -> None:
    exact = {
        smoothness(ONES, 0.1): 4.1,
        sigma_f2(ONES, PAPER): 0.3037689375,
        gamma_f2(ONES, 0.1): 192.03,
        s_fo2(ONES, PAPER): 0.0705,
        s_hf2(ONES, PAPER): 750.30300002,
        bias(ONES, PAPER): 0.2 / math.sqrt(40),
        m_fo(ONES, PAPER): 0.1 * (1 + 1 / math.sqrt(40)),
        m_hf(ONES, PAPER): 0.1 * (3 / math.sqrt(40) + 1e-3),
        beta_max(ONES, PAPER): 1 / 410,
    }
    for found, value in exact.items():
        assert found == pytest.approx(value, rel=1e-9)
    printed = {
        "4.1": smoothness(ONES, 0.1),
        "0.0316228": bias(ONES, PAPER),
        "0.3037689375": sigma_f2(ONES, PAPER),
        "192.03": gamma_f2(ONES, 0.1),
        "0.1158114": m_fo(ONES, PAPER),
        "0.0705": s_fo2(ONES, PAPER),
        "0.0475342": m_hf(ONES, PAPER),
        "750.303000": s_hf2(ONES, PAPER),
        "0.00243902": beta_max(ONES, PAPER),
        "81.6713349": sigma_t2(ONES, PAPER),
        "327.085339": bound(ONES, PAPER, rounds=1000, gap=1.0),
    }
    for digits, value in printed.items():
        assert f"{value:.{len(digits.partition('.')[2])}f}" == digits


def test_31_what_vanishes() -> None:
    still = replace(ONES, sigma_g=0.0, sigma_h=0.0)
    assert sigma_f2(still, PAPER) == 0.0
    assert gamma_f2(replace(ONES, gamma_g2=0.0, gamma_h2=0.0), 0.1) == 0.0
    fedavg = replace(PAPER, alpha=0.0)
    assert sigma_f2(ONES, fedavg) == pytest.approx(12 / 40, rel=1e-12)
    assert bias(ONES, fedavg) == m_fo(ONES, fedavg) == m_hf(ONES, fedavg) == 0.0
    assert sampling_factor(1.0, 50) == 0.0 == sampling_factor(1.0, 1)
    assert sampling_factor(0.2, 50) == pytest.approx(0.0816, abs=5e-5)


def test_31_the_error_of_the_theorem_is_the_sum_of_its_three_terms() -> None:
    of = LossConstants(B=2.0, L=3.0, rho=0.5, sigma_g=0.7, sigma_h=1.3, gamma_g2=0.2, gamma_h2=0.4)
    setting = TrainingSetting(
        alpha=0.2, beta=2e-3, tau=5, inner=10, outer=20, hessian=30, fraction=0.5, users=8
    )
    noise = 12 * (4 + 0.49 * (1 / 20 + 0.36 / 10)) * (1 + 0.04 * 1.69 / 120) - 48
    apart = 3 * 4 * 0.04 * 0.4 + 192 * 0.2
    step = 2e-3 * (12 + 0.2 * 0.5 * 2)
    terms = (
        280 * step**2 * 20 * (2 * noise + apart),
        step * (2 * noise + apart * 0.5 / (0.5 * 7)),
        4 * 0.04 * 9 * 0.49 / 10,
    )
    assert sigma_f2(of, setting) == pytest.approx(noise, rel=1e-9)
    assert sigma_t2(of, setting) == pytest.approx(sum(terms), rel=1e-9)
    assert alpha_max(of) == pytest.approx(1 / 3)
    mean, square = drift(of, setting, 3)
    assert mean == pytest.approx(4 * 2e-3 * 3 * (noise**0.5 + apart**0.5), rel=1e-9)
    assert square == pytest.approx(35 * 4e-6 * 15 * (2 * noise + apart), rel=1e-9)


def test_31_the_errors_of_fo_and_hf_where_every_constant_is_another() -> None:
    of = LossConstants(B=2.0, L=3.0, rho=0.5, sigma_g=0.7, sigma_h=1.3, gamma_g2=0.2, gamma_h2=0.4)
    setting = TrainingSetting(alpha=0.2, beta=2e-3, tau=5, inner=9, outer=16, hessian=25, delta=0.3)
    # By hand: alpha L = 0.6, sigma_g^2 = 0.49, sqrt(D) = 3, sqrt(D') = 4.
    assert m_fo(of, setting) == pytest.approx(0.6 * (0.7 / 3 + 2), rel=1e-12)
    assert s_fo2(of, setting) == pytest.approx(2 * 0.49 * (1 / 16 + 0.36 / 9) + 2 * 1.2**2, rel=1e-12)
    assert m_hf(of, setting) == pytest.approx(0.2 * (2 * 2.1 / 3 + 2.1 / 4 + 0.5 * 0.3 * 4), rel=1e-12)
    noise = 2 * 0.36 / 9 + 2 / 16 + 0.04 / (2 * 0.09 * 25)
    assert s_hf2(of, setting) == pytest.approx(6 * 0.49 * noise + 2 * 0.03**2 * 16, rel=1e-12)
    assert bias(of, setting) == pytest.approx(2 * 0.6 * 0.7 / 3, rel=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"alpha": -0.1}, {"beta": 0.0}, {"tau": 0}, {"fraction": 1.5}, {"inner": 0}]
)
def test_31_a_setting_that_is_out_of_range_is_named(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with refuses(ConfigError, name=name):
        replace(PAPER, **wrong)  # type: ignore[arg-type]
