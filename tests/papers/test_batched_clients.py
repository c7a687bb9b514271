"""Clients simulated in one call are the clients simulated one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm, Phase
from reproduce.batched_clients import rescheduled, together
from tests.invariants.fafed.tiny import Bowls, X, whole
from tests.support.reference import Client, federated

PROBLEM = Bowls.drawn(clients=4, d=3, seed=2)
START = {X: torch.ones(3, dtype=torch.float64)}
ALL = Client(0, torch.stack([each.x for each in PROBLEM.clients]), torch.zeros(4, 1, dtype=torch.float64))


def points(algorithm: Algorithm, clients: list[Client]) -> torch.Tensor:
    return torch.stack(
        [done.weights[X] for done in federated(algorithm, START, clients, rounds=3, feed=whole)]
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
