"""A federation that is stopped at a round boundary and goes on: invariant 19 of fafed.md, section 7."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.contract.algorithm import Algorithm
from tests.invariants.fafed.tiny import Bowls, X
from tests.support.reference import Client, Completed, FederationState, federated

PROBLEM = Bowls.drawn(clients=3, d=4, seed=6)
SAMPLES = 12
START = {X: torch.ones(4, dtype=torch.float64)}
OPTIONS = {"batch": 2, "steps": 3, "lr": 0.02}


def people() -> list[Client]:
    """Each with samples of its own around its problem, so that batches are random."""
    generator = torch.Generator().manual_seed(0)
    rows = [each.x + 0.3 * torch.rand((SAMPLES, 2, 4), generator=generator) for each in PROBLEM.clients]
    return [Client(number, row, torch.zeros(SAMPLES, dtype=torch.float64)) for number, row in enumerate(rows)]


def run(algorithm: Algorithm, rounds: int, standing: FederationState | None = None) -> list[Completed]:
    return list(federated(algorithm, START, people(), rounds=rounds, seed=4, standing=standing))


def stands(done: Completed) -> FederationState:
    return FederationState(done.weights, done.server_state, done.carries, done.number)


def same(one: list[Completed], other: list[Completed]) -> bool:
    return all(torch.equal(a.weights[X], b.weights[X]) for a, b in zip(one, other, strict=True))


@cache
def through() -> list[Completed]:
    """Six exchanges without a stop."""
    return run(fafed(PROBLEM.objective, **OPTIONS), 6)


@pytest.mark.parametrize("stopped", [1, 2, 4])
def test_19_a_resumed_federation_is_the_one_that_was_never_stopped(stopped: int) -> None:
    algorithm = fafed(PROBLEM.objective, **OPTIONS)
    assert same(through()[stopped:], run(algorithm, 6, stands(through()[stopped - 1])))


@pytest.mark.parametrize("stopped", [1, 2, 4])
def test_19_without_the_previous_points_it_is_another_one(stopped: int) -> None:
    algorithm = fafed(PROBLEM.objective, **OPTIONS)
    forgot = run(algorithm, 6, replace(stands(through()[stopped - 1]), carries={}))
    assert not same(through()[stopped:], forgot)


def test_19_stem_and_the_naive_method_resume_as_well() -> None:
    for algorithm in (stem(PROBLEM.objective, **OPTIONS), naive_adaptive(PROBLEM.objective, **OPTIONS)):
        every = run(algorithm, 5)
        assert same(every[3:], run(algorithm, 5, stands(every[2])))
        assert not same(every[3:], run(algorithm, 5, replace(stands(every[2]), carries={})))


def test_19_the_carry_is_needed_and_good_for_one_exchange() -> None:
    for algorithm in (fafed(PROBLEM.objective, **OPTIONS), stem(PROBLEM.objective, **OPTIONS)):
        assert algorithm.carry_rule.needed and algorithm.carry_rule.exchanges == 1
        assert algorithm.whole and algorithm.opening[0].whole
        assert not algorithm.opening[0].carry_rule.needed
    assert not naive_adaptive(PROBLEM.objective, **OPTIONS).carry_rule.needed
