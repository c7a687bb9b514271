"""Per-FedAvg's theory entries: the logistic users keep the constants that are claimed, exchanging rows makes users alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.labels import label_report
from edgefl.data.groups import groups
from edgefl.data.partition import histograms
from reproduce.per_fedavg import bounds
from reproduce.per_fedavg.bounds import ALPHA, EXACT, FO, HF, Meta, local, whole
from reproduce.per_fedavg.heterogeneity import exchanged
from reproduce.per_fedavg.logistic import LANDSCAPE, USERS, Users, starting_point


@pytest.fixture(scope="module")
def users() -> Users:
    return Users.drawn(torch.Generator().manual_seed(0))


def _loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of one sample."""
    return torch.nn.functional.cross_entropy((w.view(2, -1) @ x)[None], y[None])


def test_a_sample_keeps_b_l_and_rho(users: Users) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(20):
        x, y = users.x[number % USERS, number], users.y[number % USERS, number]
        w, v = torch.randn(2, 4, generator=generator, dtype=torch.float64)

        here, there = (torch.func.hessian(_loss)(at, x, y) for at in (w, w + 1e-4 * v))
        assert torch.func.grad(_loss)(w, x, y).norm() <= LANDSCAPE.B
        assert torch.linalg.matrix_norm(here, 2) <= LANDSCAPE.L
        assert torch.linalg.matrix_norm(there - here, 2) <= LANDSCAPE.rho * 1e-4 * v.norm()


def test_the_exact_direction_is_the_gradient_of_the_loss_after_a_step(users: Users) -> None:
    w = torch.randn(1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x, y = users.x[3], users.y[3]

    def f(at: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ at.T, y)

    def after(at: Tensor) -> Tensor:
        return f(at - ALPHA * torch.func.grad(f)(at))

    torch.testing.assert_close(Meta.of(users, 1).each(w)[0, 3], torch.func.grad(after)(w[0]))


@pytest.mark.slow
def test_all_samples_leave_fo_a_bias_that_is_the_hessians_product(users: Users) -> None:
    w = starting_point(USERS) + 0.3
    who = torch.arange(USERS)
    fo, exact = (local(mode, USERS, batch=32).direction(w, whole(users, who)) for mode in (FO, EXACT))
    found = bounds.bias(FO, users, w[:1], 32)

    torch.testing.assert_close(found, (fo - exact).flatten(1).norm(dim=1))
    assert found.min() > 1000 * bounds.bias(HF, users, w[:1], 32).max()


def test_the_theorems_right_side_falls_with_eps() -> None:
    for mode in bounds.MODES:
        sides = [bounds.theorem(mode, eps, math.log(2)) for eps in (0.04, 0.02, 0.01)]
        assert sides == sorted(sides, reverse=True)


def test_exchanged_rows_stay_with_as_many_users_and_make_them_alike() -> None:
    labels = np.tile(np.arange(10), 600)
    parts = groups(labels, 10, a=100, seed=0)

    distances = []
    for share in (0.0, 0.5, 1.0):
        dealt = exchanged(parts, share, seed=1)
        assert [len(own) for own in dealt] == [len(own) for own in parts]
        assert np.array_equal(np.sort(np.concatenate(dealt)), np.sort(np.concatenate(parts)))
        distances.append(label_report(histograms(labels, dealt, 10)).mean_tv2)
    assert distances[0] == pytest.approx(0.4)
    assert distances[0] > distances[1] > distances[2] and distances[2] < 0.02
