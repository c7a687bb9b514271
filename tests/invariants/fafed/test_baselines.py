"""Invariant 20 of fafed.md: state of SCAFFOLD, FedAdam and FedAMS."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import MEAN
from edgefl.contract.tensors import TensorSpec
from edgefl.objective.derivatives import count_derivatives
from edgefl.objective.objective import Objective
from edgefl.objective.parts import finish
from edgefl.optimizers import OPTIMIZERS, with_optimizer
from tests.algorithms.users import Users, Vector, flat, state_vector
from tests.invariants.fafed.tiny import Bowls, Trace, X, close, traced
from tests.support.errors import ConfigError, refuses
from tests.support.reference import Client, Completed, federated

TRAINING = {"batch": 4, "steps": 3, "lr": 0.02}
ROUNDS = 6


def _mean_control(done: Completed, users: Users) -> Vector:
    """mean c_i over all users; that of a user who was never asked is 0."""
    total = np.zeros(len(users.theta))
    for carry in done.carries.values():
        total += flat({name.removeprefix("control."): value for name, value in carry.items()})
    return total / len(users.clients)


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
@pytest.mark.parametrize("fraction", [1.0, 2 / 3])
def test_20_the_mean_of_scaffolds_c_i_is_c_at_all_times(eta_g: float, fraction: float) -> None:
    users = Users()
    scaffold = algorithms.build("scaffold", users.objective, **TRAINING, eta_g=eta_g)

    found = users.run(scaffold, ROUNDS, fraction=fraction)

    largest = max(float(np.abs(state_vector(done, "c")).max()) for done in found)
    for done in found:
        assert np.abs(_mean_control(done, users) - state_vector(done, "c")).max() < 1e-12 * largest


def test_20_scaffold_with_c_and_c_i_frozen_at_zero_is_fedavg_bit_for_bit() -> None:
    users = Users()
    scaffold = algorithms.build("scaffold", users.objective, **TRAINING)
    frozen = replace(
        scaffold, finish=finish(users.objective), server=replace(MEAN, state=scaffold.server.state)
    )

    found = users.run(frozen, ROUNDS)
    plain = users.run(algorithms.build("fedavg", users.objective, **TRAINING), ROUNDS)
    thawed = users.run(scaffold, ROUNDS)

    assert not state_vector(found[-1], "c").any()
    np.testing.assert_array_equal(flat(found[-1].weights), flat(plain[-1].weights))
    assert np.abs(flat(thawed[-1].weights) - flat(plain[-1].weights)).max() > 1e-3


def _adam_gap(users: Users, algorithm: Algorithm, lr: float, tau: float) -> float:
    """Largest distance of a round from x + lr Delta / (|Delta| + tau)."""
    x, gaps = users.spec.weights, []
    for done in users.run(algorithm, ROUNDS):
        mean = np.mean([flat(update) for update in done.updates.values()], axis=0)
        delta = mean - flat(x)
        gaps.append(np.abs(flat(done.weights) - (flat(x) + lr * delta / (np.abs(delta) + tau))).max())
        x = done.weights
    return float(max(gaps))


def test_20_fedadam_without_memory_takes_normalised_steps() -> None:
    users, lr, tau = Users(), 0.3, 0.02
    fedavg = algorithms.build("fedavg", users.objective, **TRAINING)
    options = {"lr": lr, "tau": tau, "beta1": 0.0}

    memoryless = with_optimizer(fedavg, "fedadam", **options, beta2=0.0)
    remembering = with_optimizer(fedavg, "fedadam", **options, beta2=0.5)

    assert _adam_gap(users, memoryless, lr, tau) < 1e-12
    assert _adam_gap(users, remembering, lr, tau) > 1e-3


@pytest.mark.parametrize("variant", ["amsgrad", "max_stabilisation"])
def test_20_fedams_vhat_never_falls_and_fedadams_v_does(variant: str) -> None:
    users = Users()
    fedavg = algorithms.build("fedavg", users.objective, **TRAINING)
    options = {"lr": 0.3, "beta2": 0.1}

    ams = users.run(with_optimizer(fedavg, "fedams", **options, variant=variant), 12)
    adam = users.run(with_optimizer(fedavg, "fedadam", **options), 12)

    vhat = np.array([state_vector(done, "vhat") for done in ams])
    v = np.array([state_vector(done, "v") for done in adam])
    assert (np.diff(vhat, axis=0) >= 0).all() and (np.diff(vhat, axis=0) > 0).any()
    assert (vhat >= np.array([state_vector(done, "v") for done in ams])).all()
    assert (np.diff(v, axis=0) < 0).any()


# -- FAFED invariants 17 and 18: floats that travel and gradients that are taken, of it and of its baselines --


CLIENTS, SAMPLES, BATCH, STEPS = 3, 12, 4, 5
FEATURES = 3
D = FEATURES * 2 + 2
UP = {
    "fafed": 3,
    "stem": 2,
    "scaffold": 2,
    "fedavg": 1,
    "fedadam": 1,
    "fedyogi": 1,
    "fedadagrad": 1,
    "fedams": 1,
}
"""Floats for each parameter, per client and round (fafed.md 2.3)."""
GRADIENTS = {name: 2 if name in ("fafed", "stem") else 1 for name in UP}


@dataclass
class Numbered:
    """Half the squared distance from labels that are the samples' numbers; it remembers whom it saw, call by call."""

    seen: list[tuple[int, ...]] = field(default_factory=list)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        self.seen.append(tuple(int(number) for number in y[:, 0]))
        return ((out - y) ** 2).sum(dim=1) / 200

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(len(y))

    def label(self, out: TensorSpec) -> TensorSpec:
        return out


def built(name: str, loss: Numbered) -> Algorithm:
    module = nn.Sequential(OrderedDict(dense=nn.Linear(FEATURES, 2)))
    objective = Objective(module, TensorSpec((FEATURES,)), loss)
    training = {"batch": BATCH, "steps": STEPS, "lr": 0.01}
    if name in OPTIMIZERS:
        return with_optimizer(algorithms.build("fedavg", objective, **training), name)
    return algorithms.build(name, objective, **training)


def rounds_of(algorithm: Algorithm, rounds: int) -> list[Completed]:
    generator = torch.Generator().manual_seed(1)
    weights = {"dense.weight": torch.randn(2, FEATURES, generator=generator), "dense.bias": torch.zeros(2)}
    clients = []
    for number in range(CLIENTS):
        numbers = torch.arange(SAMPLES, dtype=torch.float32)[:, None].repeat(1, 2) + 100 * number
        clients.append(Client(number, torch.randn(SAMPLES, FEATURES, generator=generator), numbers))
    return list(federated(algorithm, weights, clients, rounds=rounds, seed=2))


def floats(tensors: Mapping[str, Tensor]) -> int:
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", UP)
def test_17_a_round_moves_as_many_floats_up_as_the_table_says(name: str) -> None:
    algorithm = built(name, Numbered())

    last = rounds_of(algorithm, len(algorithm.opening) + 2)[-1]

    assert sum(map(floats, last.updates.values())) == UP[name] * CLIENTS * D


def test_17_the_first_exchange_moves_one_gradient_of_each_client() -> None:
    algorithm = built("fafed", Numbered())

    [opening] = rounds_of(algorithm, 1)

    assert len(algorithm.opening) == 1
    assert sum(map(floats, opening.updates.values())) == CLIENTS * D


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", UP)
def test_18_a_round_takes_as_many_gradients_as_the_table_says(name: str) -> None:
    loss = Numbered()
    algorithm = built(name, loss)
    openings = len(algorithm.opening)

    with count_derivatives() as before:
        rounds_of(algorithm, openings + 1)
    loss.seen.clear()
    with count_derivatives() as after:
        rounds_of(algorithm, openings + 2)

    wanted = GRADIENTS[name] * STEPS * CLIENTS
    assert after.gradients - before.gradients == wanted
    assert after.products == 0
    assert len(loss.seen) == after.gradients, "each gradient counted is one pass through the loss"


@pytest.mark.parametrize("name", ["fafed", "stem"])
def test_18_both_gradients_of_a_step_see_the_same_samples(name: str) -> None:
    loss = Numbered()
    algorithm = built(name, loss)

    rounds_of(algorithm, len(algorithm.opening) + 1)

    main = loss.seen[-2 * STEPS * CLIENTS :]
    pairs = list(zip(main[::2], main[1::2], strict=True))
    assert all(new == old for new, old in pairs)
    assert len({new for new, _ in pairs}) > CLIENTS, "each step draws samples of its own"


# -- FAFED with one number as second moment of the whole model (fafed.md 2.3, the optional ones), beside a plain loop --


PROBLEM = Bowls.drawn(clients=3, d=4, seed=7)
START = {X: torch.linspace(-1, 2, 4, dtype=torch.float64)}
Q, LR, ALPHA, BETA, RHO = 3, 0.05, 0.3, 0.6, 0.02
Made = Callable[[Tensor], Tensor]
Kept = Callable[[Tensor, Tensor], Tensor]


def fading(v: Tensor, new: Tensor) -> Tensor:
    return BETA * v + (1 - BETA) * new


def norm(g: Tensor) -> Tensor:
    return (g * g).sum()


KINDS: dict[str, tuple[Made, Kept]] = {
    "elementwise": (lambda g: g * g, fading),
    "scalar": (norm, fading),
    "scalar_mean": (lambda g: norm(g) / 4, fading),
    "adagrad_norm": (norm, lambda v, new: v + new),
}


@cache
def found(kind: str, rounds: int = 6, **options: Any) -> Trace:
    made = fafed(
        PROBLEM.objective,
        batch=1,
        steps=Q,
        lr=LR,
        alpha=ALPHA,
        beta=BETA,
        rho=RHO,
        second_moment=kind,
        **options,
    )
    return traced(made, START, PROBLEM.clients, rounds=rounds)


def looped(made: Made, kept: Kept, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """(xbar, vbar) after each exchange, of the loop of 2.3 written out; v is a number, or a vector."""
    n = len(PROBLEM.a)
    grads = [PROBLEM.gradient(i, START[X]) for i in range(n)]
    m, v = sum(grads) / n, sum(made(g) for g in grads) / n
    A = v.sqrt() + RHO
    before, x = [START[X]] * n, [START[X] - LR * m / A] * n
    after = [(x[0], v)]
    for _ in range(rounds - 1):
        ms, vs = [m] * n, [v] * n
        for k in range(Q):
            for i in range(n):
                new = PROBLEM.gradient(i, x[i])
                ms[i] = new + (1 - ALPHA) * (ms[i] - PROBLEM.gradient(i, before[i]))
                vs[i] = kept(vs[i], made(new))
            before = x
            if k < Q - 1:
                x = [x[i] - LR * ms[i] / A for i in range(n)]
        m, v = sum(ms) / n, sum(vs) / n
        A = v.sqrt() + RHO
        x = [sum(x) / n - LR * m / A] * n
        after.append((x[0], v))
    return after


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_each_second_moment_is_that_of_a_plain_loop(kind: str) -> None:
    for done, (x, v) in zip(found(kind).rounds, looped(*KINDS[kind], 6), strict=True):
        assert close(done.weights[X], x, 1e-12)
        assert close(done.server_state[f"v/{X}"], v.expand(4), 1e-11)


def test_they_lead_elsewhere() -> None:
    last = [found(kind).rounds[-1].weights[X] for kind in KINDS]
    pairs = [(a, b) for i, a in enumerate(last) for b in last[:i]]
    assert all(not close(a, b, 1e-3) for a, b in pairs)


@pytest.mark.parametrize("kind", ["scalar", "scalar_mean", "adagrad_norm"])
def test_of_the_three_a_step_has_the_direction_of_the_momentum(kind: str) -> None:
    """One number in front of it; elementwise it points elsewhere."""

    def turned(trace: Trace) -> float:
        each = trace.steps[0][0]
        step = each.after - each.x
        return 1 + float(torch.dot(step, each.m) / (step.norm() * each.m.norm()))

    assert turned(found(kind)) < 1e-12
    assert turned(found("elementwise")) > 1e-3


def test_adagrad_norm_never_takes_from_v() -> None:
    def norms(kind: str) -> list[float]:
        return [float(done.server_state[f"v/{X}"][0]) for done in found(kind, rounds=10).rounds]

    grown, faded = norms("adagrad_norm"), norms("scalar")
    assert grown == sorted(grown) and grown[0] < grown[-1]
    assert faded != sorted(faded)


def test_a_clipped_gradient_is_what_enters() -> None:
    first = found("scalar", rounds=1, clip=0.5).rounds[0].server_state[f"v/{X}"]
    assert close(first, torch.full((4,), 0.25, dtype=torch.float64), 1e-12), "all three are longer than that"


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with refuses(ConfigError, value="global"):
        found("global")
