"""Invariants 15 to 17, 33 and 35 of the Per-FedAvg spec: whole rounds over users."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from tests.invariants.fafed.quadratic import (
    NAME,
    batches,
    direction,
    elu_net,
    flat,
    normal,
    positive,
    quadratic,
    random_batch,
    random_weights,
    user,
)
from tests.invariants.per_fedavg.wrong import FROM_ADAPTED, wrong
from tests.support.reference import (
    Client,
    Completed,
    FederationState,
    completed,
    drawn,
    federated,
    run_round,
    selection,
)

D = 3
MODES = ("fo", "hf", "exact")
BETA, ALPHA = 0.1, 0.2


def users(count: int) -> list[Client]:
    return [user(number, positive(D, number), normal((D,), 50 + number)) for number in range(count)]


def algorithm_of(mode: str, steps: int = 1) -> Algorithm:
    """HF with delta = 1, where quadratics leave a quotient all of its digits."""
    delta = {"delta": 1.0} if mode == "hf" else {}
    return per_fedavg(quadratic(D), batch=1, steps=steps, lr=BETA, alpha=ALPHA, mode=mode, **delta)  # type: ignore[arg-type]


def run(algorithm: Algorithm, clients: Sequence[Client], weights: Tensors, **options: Any) -> list[Completed]:
    return list(federated(algorithm, weights, clients, **{"rounds": 1, **options}))


def full_batch_direction(algorithm: Algorithm, client: Client, weights: Tensors) -> Tensor:
    return direction(algorithm, weights, batches(*[(client.x, client.y)] * 3))[NAME]


def is_a_maml_step(algorithm: Algorithm, count: int, fraction: float) -> bool:
    """Invariant 15: the round subtracts beta times the mean of the users' meta-gradients."""
    clients, w = users(count), {NAME: normal((D,), 7)}
    (done,) = run(algorithm, clients, w, fraction=fraction, seed=3)
    right = algorithm_of("exact")
    mean = torch.stack([full_batch_direction(right, clients[at], w) for at in done.selected]).mean(0)
    return bool((done.weights[NAME] - (w[NAME] - BETA * mean)).abs().max() < 1e-12)


@pytest.mark.parametrize("mode", ["exact", "hf"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_15_one_local_step_is_one_maml_step_over_the_users(mode: str, fraction: float) -> None:
    assert is_a_maml_step(algorithm_of(mode), 4, fraction)


def test_15_fails_for_first_order_and_for_two_consecutive_steps() -> None:
    assert not is_a_maml_step(algorithm_of("fo"), 4, 1.0)
    two = wrong(FROM_ADAPTED, quadratic(D), batch=1, lr=BETA, alpha=ALPHA)
    assert not is_a_maml_step(replace(two, phases=(replace(two.phases[0], steps=1),)), 4, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_15_the_mean_is_over_the_selected_users_to_the_last_bits(mode: str) -> None:
    clients, w = users(4), {NAME: normal((D,), 7)}
    algorithm = algorithm_of(mode)
    (done,) = run(algorithm, clients, w, fraction=0.5, seed=3)
    assert len(done.selected) == 2
    mean = torch.stack([full_batch_direction(algorithm, clients[at], w) for at in done.selected]).mean(0)
    assert (done.weights[NAME] - (w[NAME] - BETA * mean)).abs().max() < 1e-12


@pytest.mark.parametrize("power_of", [("fo", 1), ("hf", 2), ("exact", 2)])
def test_16_with_one_user_it_is_maml_on_one_task(power_of: tuple[str, int]) -> None:
    mode, power = power_of
    (client,) = users(1)
    w = normal((D,), 7)
    found = run(algorithm_of(mode, steps=3), [client], {NAME: w}, rounds=2)[-1].weights[NAME]

    a, b = client.x[0, :, :-1], client.x[0, :, -1]
    factor = torch.linalg.matrix_power(torch.eye(D, dtype=torch.float64) - ALPHA * a, power)
    for _ in range(6):
        w = w - BETA * factor @ (a @ w - b)

    assert (found - w).abs().max() < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_17_averaging_changes_nothing_for_identical_users(mode: str) -> None:
    first = users(1)[0]
    clients = [replace(first, number=number) for number in range(4)]
    w, algorithm = {NAME: normal((D,), 7)}, algorithm_of(mode, steps=3)

    def paths(fraction: float, among: Sequence[Client]) -> list[Tensor]:
        found = []
        for done in run(algorithm, among, w, fraction=fraction, rounds=3):
            sent = [update[NAME] for update in done.updates.values()]
            assert all(torch.equal(each, sent[0]) for each in sent)
            found.append(done.weights[NAME])
        return found

    alone = paths(1.0, clients[:1])
    for fraction in (0.25, 0.5, 1.0):
        for one, many in zip(alone, paths(fraction, clients), strict=True):
            assert (one - many).abs().max() < 1e-12


def noisy() -> tuple[Algorithm, list[Client], Tensors]:
    """Mini-batches of a small net: results depend on every random stream."""
    objective = elu_net()
    clients = [Client(number, *random_batch(objective, 12, number)) for number in range(4)]
    algorithm = per_fedavg(objective, batch=3, steps=2, lr=BETA, alpha=ALPHA, mode="hf")
    return algorithm, clients, random_weights(objective, 9)


def in_a_pool(workers: int, seed: int) -> Tensors:
    """The same rounds, users in parallel with an algorithm each; the last one given is the first one begun."""
    algorithm, clients, now = noisy()
    algorithms = {client.number: noisy()[0] for client in clients}
    with ThreadPoolExecutor(workers) as pool:
        for number in range(1, 4):
            chosen = selection(seed, number, len(clients), 2)
            begun = {
                at: pool.submit(run_round, algorithms[at], now, drawn(algorithm, clients[at], seed, number))
                for at in reversed(chosen)
            }
            now = completed(algorithm, now, [begun[at].result().update for at in chosen], algorithm.hyper)
    return now


def test_33_workers_do_not_change_the_result() -> None:
    algorithm, clients, w = noisy()
    expected = run(algorithm, clients, w, rounds=3, fraction=0.5, seed=2)[-1].weights
    for workers in (1, 2):
        found = in_a_pool(workers, seed=2)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(flat(in_a_pool(2, seed=3)), flat(expected))


@pytest.mark.parametrize("pause", [1, 2])
def test_35_a_run_that_was_resumed_ends_where_an_uninterrupted_one_does(pause: int) -> None:
    algorithm, clients, w = noisy()
    options = {"rounds": 4, "fraction": 0.5, "seed": 2}
    whole = run(algorithm, clients, w, **options)

    left = whole[pause - 1]
    standing = FederationState(left.weights, left.server_state, left.carries, completed=pause)
    resumed = run(algorithm, clients, {}, **options, standing=standing)

    assert [done.number for done in resumed] == list(range(pause + 1, 5))
    assert resumed[-1].selected == whole[-1].selected
    assert all(torch.equal(resumed[-1].weights[name], whole[-1].weights[name]) for name in w)
    restarted = run(algorithm, clients, left.weights, rounds=4 - pause, fraction=0.5, seed=2)
    assert not torch.equal(flat(restarted[-1].weights), flat(whole[-1].weights))


def test_users_keep_nothing_between_rounds() -> None:
    algorithm, clients, w = noisy()
    (done,) = run(algorithm, clients, w)
    assert not done.carries
    assert not done.server_state
