"""Per-FedAvg's rows can be spread over users, and its theory runs on steps that are gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.api.federation import load_federation
from edgefl.contract.algorithm import Algorithm, Phase
from edgefl.data.groups import groups
from reproduce.batched_clients import together
from reproduce.entry import SCALES, Federated, Scale
from reproduce.per_fedavg.table1 import TABLE1
from reproduce.per_fedavg.theory import ALPHA, EXACT, FO, HF, Users, each_user
from tests.invariants.fafed.tiny import Bowls, X
from tests.invariants.fafed.tiny import whole as every_sample
from tests.support.reference import Client, federated

SAMPLES = {"mnist": (5421, 892), "cifar10_jpeg": (5000, 1000)}
"""Training and test samples of the rarest class."""


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_has_the_samples_that_its_users_are_given(scale: Scale) -> None:
    for arm in TABLE1.arms(scale):
        assert isinstance(arm, Federated)
        federation = load_federation(None, arm.settings)
        data, users = federation.data, federation.tiers["user"].count
        train, test = SAMPLES[data.name]
        for a, most in ((data.group_samples, train), (data.group_test_samples, test)):
            parts = groups(np.tile(np.arange(10), most), users, a=a, single_class=data.single_class, seed=0)
            assert len(parts) == users and len(parts[0]) == 5 * a


def test_claims_have_the_direction_of_the_papers_numbers() -> None:
    found = {claim.text: claim.paper for claim in TABLE1.claims}

    assert (
        found["HF above FedAvg: MNIST, tau 10"] == "+3.89"
        and found["FedAvg above FO: CIFAR, alpha 0.01"] == "+10.65"
    )
    assert found["HF: alpha 0.01 above 0.001"] == "+2.59" and found["FO: alpha 0.001 above 0.01"] == "+8.72"
    assert len(found) == len(TABLE1.claims) == 31


@pytest.fixture(scope="module")
def users() -> Users:
    return Users.drawn(torch.Generator().manual_seed(0))


def test_the_exact_direction_is_the_gradient_of_the_loss_after_a_step(users: Users) -> None:
    w = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x, y = users.x[3], users.y[3]

    def f(at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ at.T, y)

    def after(at: torch.Tensor) -> torch.Tensor:
        return f(at - ALPHA * torch.func.grad(f)(at))

    torch.testing.assert_close(each_user(EXACT, users, w)[3], torch.func.grad(after)(w))
    fo = torch.func.grad(f)(w - ALPHA * torch.func.grad(f)(w))
    torch.testing.assert_close(each_user(FO, users, w)[3], fo)
    assert (each_user(HF, users, w)[3] - torch.func.grad(after)(w)).norm() < 1e-6


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


def test_a_pass_over_the_data_is_refused() -> None:
    algorithm = sgd(PROBLEM.objective, batch=1, steps=1, lr=0.1)
    phase = Phase("all", algorithm.phases[0].function, 0, over_data=True)
    with pytest.raises(ValueError, match="simulate its clients apart"):
        together(replace(algorithm, phases=(phase,)), 2)
