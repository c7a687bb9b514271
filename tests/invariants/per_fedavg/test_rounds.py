"""Invariants 15 to 17, 33 and 35 of the Per-FedAvg spec: whole rounds over users."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.algorithms.baselines.fedavg import fedavg
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import sequential
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import tiny
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
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, refuses
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


@pytest.mark.parametrize("mode", ["exact", "hf"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_15_one_local_step_is_one_maml_step_over_the_users(mode: str, fraction: float) -> None:
    """The round subtracts beta times the mean of the selected users' meta-gradients."""
    clients, w = users(4), {NAME: normal((D,), 7)}
    (done,) = run(algorithm_of(mode), clients, w, fraction=fraction, seed=3)
    assert len(done.selected) == 4 * fraction
    right = algorithm_of("exact")
    mean = torch.stack([full_batch_direction(right, clients[at], w) for at in done.selected]).mean(0)
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


# -- invariants 20 to 23 of the Per-FedAvg spec, golden numbers included: where the rounds lead to ---------


POWER = {"fedavg": 0, "fo": 1, "exact": 2, "hf": 2}


def fixed_points_algorithm(method: str, dimension: int, *, steps: int, lr: float, alpha: float) -> Algorithm:
    objective = quadratic(dimension)
    if method == "fedavg":
        return fedavg(objective, batch=1, steps=steps, lr=lr)
    return per_fedavg(objective, batch=1, steps=steps, lr=lr, alpha=alpha, mode=method)


def led_to(algorithm: Algorithm, clients: Sequence[Client], start: Tensor, rounds: int) -> Tensor:
    *_, last = federated(algorithm, {NAME: start}, clients, rounds=rounds)
    return last.weights[NAME]


def of(client: Client) -> tuple[Tensor, Tensor]:
    return client.x[0, :, :-1], client.x[0, :, -1]


def fixed_point(clients: Sequence[Client], power: int, steps: int, lr: float, alpha: float) -> Tensor:
    """``(sum_i (I - M_i^tau))^{-1} sum_i (I - M_i^tau) A_i^{-1} b_i``, M_i = I - beta (I - alpha A_i)^p A_i."""
    left, right = 0.0, 0.0
    for a, b in map(of, clients):
        eye = torch.eye(len(b), dtype=torch.float64)
        m = eye - lr * torch.linalg.matrix_power(eye - alpha * a, power) @ a
        moved = eye - torch.linalg.matrix_power(m, steps)
        left, right = left + moved, right + moved @ torch.linalg.solve(a, b)
    return torch.linalg.solve(left, right)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", POWER)
@pytest.mark.parametrize(("steps", "rounds"), mostly_slow([(1, 40), (5, 9)], [(5, 9)]))
def test_20_rounds_lead_to_the_fixed_point_of_the_formula(method: str, steps: int, rounds: int) -> None:
    clients = [user(i, positive(3, i, 0.7, 2.0), normal((3,), 50 + i)) for i in range(2)]
    setting = {"steps": steps, "lr": 0.8, "alpha": 0.1}

    found = led_to(
        fixed_points_algorithm(method, 3, **setting), clients, torch.zeros(3, dtype=torch.float64), rounds
    )

    assert (found - fixed_point(clients, POWER[method], **setting)).abs().max() < 1e-9
    others = {p for p in (0, 1, 2) if p != POWER[method]}
    assert all((found - fixed_point(clients, p, **setting)).abs().max() > 1e-4 for p in others)


def two_users() -> list[Client]:
    """f_1 = w^2 / 2 and f_2 = 2 (w - 1)^2: A = 1, 4 and minimisers 0, 1."""
    return [
        user(i, torch.tensor([[a]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64))
        for i, (a, b) in enumerate([(1.0, 0.0), (4.0, 4.0)])
    ]


@functools.cache
def led_two(method: str, rounds: int = 32) -> float:
    start = torch.tensor([5.0], dtype=torch.float64)
    return float(
        led_to(fixed_points_algorithm(method, 1, steps=1, lr=0.5, alpha=0.1), two_users(), start, rounds)
    )


GOLDEN = {"fedavg": 0.8, "fo": 8 / 11, "exact": 0.64, "hf": 0.64}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", GOLDEN)
def test_21_two_scalar_users(method: str) -> None:
    assert abs(led_two(method) - GOLDEN[method]) < 1e-9


def meta_loss(w: Tensor, alpha: float = 0.1) -> Tensor:
    """F of the two users."""
    losses = []
    for a, b in map(of, two_users()):
        adapted = w - alpha * (a @ w - b)
        losses.append(adapted @ a @ adapted / 2 - b @ adapted)
    return torch.stack(losses).mean()


def test_22_only_the_second_order_point_is_stationary_for_the_meta_loss() -> None:
    points = {method: torch.tensor([led_two(method)], dtype=torch.float64) for method in GOLDEN}
    slopes = {method: float(torch.func.grad(meta_loss)(w).norm()) for method, w in points.items()}
    assert slopes["exact"] < 1e-9
    assert slopes["hf"] < 1e-9
    assert slopes["fo"] > 1e-2
    assert slopes["fedavg"] > 1e-2
    for method in ("exact", "hf"):
        assert meta_loss(points[method]) < meta_loss(points["fo"]) < meta_loss(points["fedavg"])


def _after_200_steps(method: str) -> float:
    clients = [user(0, torch.tensor([[3.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    algorithm = fixed_points_algorithm(method, 1, steps=200, lr=0.05, alpha=0.5)
    return float(led_to(algorithm, clients, torch.ones(1, dtype=torch.float64), 1))


@pytest.mark.parametrize(
    ("method", "expected"),
    mostly_slow([("fo", 1.9e6), ("exact", 4.8e-4), ("hf", 4.8e-4)], [("fo", 1.9e6), ("exact", 4.8e-4)]),
)
def test_23_first_order_ascends_where_the_inner_step_overshoots(method: str, expected: float) -> None:
    assert _after_200_steps(method) == pytest.approx(expected, rel=0.01)


# -- options of per_fedavg: what is refused, and what a choice leaves in the algorithm ---------------------


@pytest.mark.parametrize(
    ("options", "details"),
    [
        ({"alpha": -0.1}, {"option": "alpha", "value": -0.1}),
        ({"alpha": float("nan")}, {"option": "alpha", "value": ...}),
        ({"lr": -1.0}, {"option": "lr", "value": -1.0}),
        ({"delta": 0.0}, {"option": "delta", "value": 0.0}),
        ({"delta0": -1e-2}, {"option": "delta0", "value": -0.01}),
        ({"delta": 1e-3, "delta0": 1e-2}, {"delta": 0.001, "delta0": 0.01}),
        ({"mode": "maml"}, {"option": "mode", "value": "maml"}),
        ({"hessian_batch": "outer"}, {"option": "hessian_batch", "value": "outer"}),
        ({"inner_steps": 0}, {"option": "inner_steps", "value": 0}),
        ({"schedule": "cosine"}, {"option": "schedule", "value": "cosine"}),
        ({"steps": -1}, {"option": "steps", "value": -1}),
        ({"batch": 0}, {"option": "batch", "value": 0}),
        ({"inner_batch": -2}, {"option": "inner_batch", "value": -2}),
        ({"inner_batch": 0}, {"option": "inner_batch", "value": 0}),
        ({"hessian_batch_size": 0}, {"option": "hessian_batch_size", "value": 0}),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, Any], details: dict[str, object]) -> None:
    with refuses(ConfigError, **details):
        per_fedavg(quadratic(2), **options)


@pytest.mark.parametrize(
    ("options", "scalars"),
    [
        ({"mode": "fo"}, {"lr": 0.001, "alpha": 0.01}),
        ({"mode": "EXACT"}, {"lr": 0.001, "alpha": 0.01}),
        ({"mode": "HF"}, {"lr": 0.001, "alpha": 0.01, "delta0": 1e-4}),
        ({"delta0": 0.5}, {"lr": 0.001, "alpha": 0.01, "delta0": 0.5}),
        ({"delta": 1e-3, "alpha": 0.0}, {"lr": 0.001, "alpha": 0.0, "delta": 1e-3}),
    ],
)
def test_the_scalars_of_a_round_follow_the_mode(options: dict[str, Any], scalars: dict[str, float]) -> None:
    algorithm = per_fedavg(quadratic(2), **options)
    assert algorithm.hyper == scalars
    read = {name for each in algorithm.functions for name in each.inputs if name.startswith("hyper.")}
    assert read == {f"hyper.{name}" for name in scalars}


def test_a_diminishing_step_falls_with_the_root_of_the_round() -> None:
    """Remark G.1: beta_k = O(1 / sqrt(tau k)); the steps of one round share it."""
    algorithm = per_fedavg(quadratic(2), lr=0.4, schedule="diminishing")
    rates = [algorithm.schedule(position, 50)["lr"] for position in range(16)]
    assert rates == pytest.approx([0.4 / (k + 1) ** 0.5 for k in range(16)])
    assert per_fedavg(quadratic(2), lr=0.4).schedule(15, 50) == {}


def test_rounds_take_the_step_that_was_announced() -> None:
    """One user, one local step and alpha = 0: gradient descent on w^T A w / 2 - b^T w."""
    a, b = positive(2, seed=1), normal((2,), 2)
    options: dict[str, Any] = {"batch": 1, "steps": 1, "lr": 0.4, "alpha": 0.0, "schedule": "diminishing"}
    start = {NAME: torch.ones(2, dtype=torch.float64)}

    done = federated(per_fedavg(quadratic(2), **options), start, [user(0, a, b)], rounds=5)

    w = start[NAME]
    for k, each in enumerate(done, start=1):
        w = w - 0.4 / k**0.5 * (a @ w - b)
        assert torch.allclose(each.weights[NAME], w, rtol=0, atol=1e-13)


def test_in_float32_the_default_reach_is_larger() -> None:
    assert per_fedavg(Objective.of(OutputSide(tiny("mlp"), 0))).hyper["delta0"] == 1e-2


def test_every_batch_is_drawn_anew_and_the_server_takes_the_plain_mean() -> None:
    algorithm = per_fedavg(quadratic(2))
    assert algorithm.draws == "draw"
    assert algorithm.server.name == "mean"
    assert not algorithm.server_state
    assert not algorithm.whole


def test_unequal_batches_are_refused_beside_dropout() -> None:
    net = sequential([("net", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))])
    objective = Objective(net, TensorSpec((4,)))
    assert "noise.net.1.uniform" in per_fedavg(objective, batch=6).phases[0].function.inputs
    with refuses(ConfigError, sizes=...):
        per_fedavg(objective, batch=6, inner_batch=3)


def test_momentum_is_no_option_of_it() -> None:
    with refuses(ConfigError, unknown=["momentum"], accepted=...):
        algorithms.build("per_fedavg", quadratic(2), momentum=0.9)
