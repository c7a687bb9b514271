"""Per-FedAvg's table: its rows can be spread over users at every scale, and its claims read the rows that were run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.analysis.heterogeneity.labels import label_report
from edgefl.api.federation import load_federation
from edgefl.contract.algorithm import Algorithm, Phase
from edgefl.data.groups import groups
from edgefl.data.partition import histograms
from reproduce.batched_clients import rescheduled, together
from reproduce.entry import SCALES, Federated, Scale
from reproduce.per_fedavg import bounds
from reproduce.per_fedavg.bounds import ALPHA, EXACT, FO, Meta, local, whole
from reproduce.per_fedavg.bounds import HF as THEORY_HF
from reproduce.per_fedavg.heterogeneity import exchanged
from reproduce.per_fedavg.judges import ahead, change
from reproduce.per_fedavg.logistic import LANDSCAPE, USERS, Users, starting_point
from reproduce.per_fedavg.personal import AFTER
from reproduce.per_fedavg.rows import FEDAVG, HF
from reproduce.per_fedavg.table1 import ENTRY, LARGER, MNIST_4, MNIST_10, MNIST_ROWS, SINGLE
from reproduce.results import Results, larger_lead
from tests.invariants.fafed.tiny import Bowls, X
from tests.invariants.fafed.tiny import whole as every_sample
from tests.support.reference import Client, federated

CLASSES = 10
SAMPLES = {"mnist": (5421, 892), "cifar10_jpeg": (5000, 1000)}
"""Training and test samples of the rarest class."""


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_has_the_samples_that_its_users_are_given(scale: Scale) -> None:
    for arm in ENTRY.arms(scale):
        assert isinstance(arm, Federated)
        federation = load_federation(None, arm.settings)
        data, users = federation.data, federation.tiers["user"].count
        train, test = SAMPLES[data.name]
        for a, most, used in (
            (data.group_samples, train, data.train_samples),
            (data.group_test_samples, test, data.test_samples),
        ):
            labels = np.tile(np.arange(CLASSES), most)[: used or None]
            parts = groups(labels, users, a=a, single_class=data.single_class, seed=0)
            assert len(parts) == users and len(parts[0]) == 5 * a


def results(**after: float) -> Results:
    """Of one seed, accuracy after a step by arm."""
    arms = {"mnist": MNIST_4, "main": LARGER, "single": SINGLE}
    names = {f"{key}_{each}": row.arm(each) for key, row in arms.items() for each in (FEDAVG, HF)}
    return Results(
        [0],
        {names[key]: [{AFTER: value}] for key, value in after.items()},
        {names[key]: [{}] for key in after},
    )


def test_a_method_is_ahead_in_the_rows_that_were_run() -> None:
    found = results(mnist_FedAvg=0.5, mnist_HF=0.6)

    judged = ahead(HF, FEDAVG, MNIST_ROWS)(found)

    assert judged.held and judged.ours == f"{MNIST_4.name}: +10.00"
    assert not ahead(FEDAVG, HF, MNIST_ROWS)(found).held
    assert not ahead(HF, FEDAVG, (MNIST_10,))(found).held


def test_leads_and_changes_are_compared_between_rows() -> None:
    found = results(main_FedAvg=0.4, main_HF=0.5, single_FedAvg=0.5, single_HF=0.7)

    single, larger = ((row.arm(HF), row.arm(FEDAVG)) for row in (SINGLE, LARGER))
    assert larger_lead(single, larger, AFTER)(found).ours == "+20.00 against +10.00"
    assert larger_lead(single, larger, AFTER)(found).held
    assert not larger_lead(larger, single, AFTER)(found).held
    assert change(HF, LARGER, SINGLE, AFTER, least=0, most=1)(found).held
    assert not change(HF, LARGER, SINGLE, AFTER, least=-1, most=0)(found).held


# -- per-FedAvg's theory entries ---------------------------------------------------------------------------


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
    assert found.min() > 1000 * bounds.bias(THEORY_HF, users, w[:1], 32).max()


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


# -- clients simulated in one call are the clients simulated one by one ------------------------------------


PROBLEM = Bowls.drawn(clients=4, d=3, seed=2)
START = {X: torch.ones(3, dtype=torch.float64)}
ALL = Client(0, torch.stack([each.x for each in PROBLEM.clients]), torch.zeros(4, 1, dtype=torch.float64))


def points(algorithm: Algorithm, clients: list[Client]) -> torch.Tensor:
    return torch.stack(
        [done.weights[X] for done in federated(algorithm, START, clients, rounds=3, feed=every_sample)]
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [fafed, stem, naive_adaptive, sgd])
def test_together_is_one_by_one(make: Callable[..., Algorithm]) -> None:
    algorithm = make(PROBLEM.objective, batch=1, steps=3, lr=0.05)
    apart, at_once = points(algorithm, PROBLEM.clients), points(together(algorithm, 4), [ALL])
    assert torch.allclose(apart, at_once, rtol=0, atol=1e-13)
    assert (apart[-1] - START[X]).abs().max() > 1e-2


def test_one_recording_serves_all_schedules() -> None:
    plain, other = (
        fafed(PROBLEM.objective, batch=1, steps=2, lr=lr, schedule=schedule)
        for lr, schedule in ((0.05, "constant"), (0.2, "decaying"))
    )
    recorded = rescheduled(together(plain, 4), other)
    assert torch.allclose(points(recorded, [ALL]), points(other, PROBLEM.clients), rtol=0, atol=1e-13)


def test_a_pass_over_the_data_is_refused() -> None:
    algorithm = sgd(PROBLEM.objective, batch=1, steps=1, lr=0.1)
    phase = Phase("all", algorithm.phases[0].function, 0, over_data=True)
    with pytest.raises(ValueError, match="simulate its clients apart"):
        together(replace(algorithm, phases=(phase,)), 2)
