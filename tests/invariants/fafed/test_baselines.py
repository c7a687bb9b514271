"""Invariant 20 of fafed.md: what SCAFFOLD, FedAdam and FedAMS keep, and the variants that do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgefl import algorithms
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.server import MEAN, Scalars, beside, state_of
from edgefl.contract.tensors import Tensors
from edgefl.objective.parts import finish
from edgefl.optimizers import with_optimizer
from tests.algorithms.users import Users, Vector, flat, state_vector
from tests.support.reference import Completed

TRAINING = {"batch": 4, "steps": 3, "lr": 0.02}
ROUNDS = 6


def _mean_control(done: Completed, users: Users) -> Vector:
    """mean c_i over all users; that of a user who was never asked is 0."""
    total = np.zeros(len(users.theta))
    for carry in done.carries.values():
        total += flat({name.removeprefix("control."): value for name, value in carry.items()})
    return total / len(users.clients)


def _apart(algorithm: Algorithm, users: Users, fraction: float = 1.0) -> float:
    """Largest |mean c_i - c| of any round, over the largest |c|."""
    found = users.run(algorithm, ROUNDS, fraction=fraction)
    off = max(float(np.abs(_mean_control(done, users) - state_vector(done, "c")).max()) for done in found)
    return off / max(float(np.abs(state_vector(done, "c")).max()) for done in found)


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
@pytest.mark.parametrize("fraction", [1.0, 2 / 3])
def test_20_the_mean_of_scaffolds_c_i_is_c_at_all_times(eta_g: float, fraction: float) -> None:
    users = Users()

    assert (
        _apart(algorithms.build("scaffold", users.objective, **TRAINING, eta_g=eta_g), users, fraction)
        < 1e-12
    )


def test_20_the_mean_is_lost_where_a_part_moves_c_as_all_would() -> None:
    users = Users()
    right = algorithms.build("scaffold", users.objective, **TRAINING)

    def step(before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        return right.server.step(before, mean, {**hyper, "share": 1.0})

    wrong = replace(right, server=replace(right.server, step=step))

    assert _apart(wrong, users) < 1e-12
    assert _apart(wrong, users, 2 / 3) > 1e-2


def test_20_the_mean_is_lost_where_c_is_not_taken_off_c_i() -> None:
    users = Users()
    right = algorithms.build("scaffold", users.objective, **TRAINING)

    def kept(tensors: Tensors) -> Tensors:
        found = right.finish(tensors)
        c = state_of(
            {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}, "c"
        )
        return found | {f"carry.control.{n}": found[f"carry.control.{n}"] + c[n] for n in c}

    wrong = replace(right, finish=Function("finish", kept, right.finish.inputs))

    assert _apart(wrong, users) > 1e-2


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


def test_20_tau_inside_of_the_root_is_not_fedadam() -> None:
    users, lr, tau = Users(), 0.3, 0.02
    fedavg = algorithms.build("fedavg", users.objective, **TRAINING)

    def inside(before: Tensors, mean: Tensors, _hyper: Scalars) -> Tensors:
        found: Tensors = {}
        for name in state_of(before, "m"):
            delta = mean[name] - before[name]
            found |= {name: before[name] + lr * delta / (delta.square() + tau**2).sqrt()}
            found |= beside("m", {name: delta})
        return found

    wrong = replace(fedavg, server=replace(MEAN, state={"m": 0.0}, step=inside))

    assert (
        _adam_gap(users, with_optimizer(fedavg, "fedadam", lr=lr, beta1=0, beta2=0, tau=tau), lr, tau) < 1e-12
    )
    assert _adam_gap(users, wrong, lr, tau) > 1e-3


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
