"""Every baseline's rounds against a loop in plain numpy that reads like its formula (fafed.md 3)."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl import algorithms
from tests.algorithms.users import Users, Vector, flat, state_vector

BATCH, STEPS, LR, ROUNDS = 4, 3, 0.02, 4
TRAINING = {"batch": BATCH, "steps": STEPS, "lr": LR}


def _sgd(users: Users, user: int, x: Vector, number: int, steps: int = STEPS) -> Vector:
    y = x
    for step in range(steps):
        y = y - LR * users.gradient(user, y, users.batch(user, number, step, BATCH))
    return y


def _same(found: Vector, wanted: Vector) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("fedavg", {}, STEPS),
        ("fedavg_update", {"alpha": 0.3}, STEPS),
        ("fedavg_matched", {"factor": 2}, 2 * STEPS),
        ("fedprox", {"mu": 0.0}, STEPS),
    ],
)
def test_fedavg_is_local_sgd_and_the_mean(name: str, options: dict[str, float], steps: int) -> None:
    users = Users()

    found = users.run(algorithms.build(name, users.objective, **TRAINING, **options), ROUNDS)

    x = users.theta
    for number in range(1, ROUNDS + 1):
        x = np.mean([_sgd(users, user, x, number, steps) for user in range(3)], axis=0)
        _same(flat(found[number - 1].weights), x)


def test_fedprox_pulls_each_step_back_to_the_rounds_weights() -> None:
    users, mu = Users(), 0.7

    found = users.run(algorithms.build("fedprox", users.objective, **TRAINING, mu=mu), ROUNDS)

    x = users.theta
    for number in range(1, ROUNDS + 1):
        left = []
        for user in range(3):
            y = x
            for step in range(STEPS):
                g = users.gradient(user, y, users.batch(user, number, step, BATCH))
                y = y - LR * (g + mu * (y - x))
            left.append(y)
        x = np.mean(left, axis=0)
        _same(flat(found[number - 1].weights), x)


@pytest.mark.parametrize("eta_g", [1.0, 0.6])
def test_scaffold_corrects_each_step_and_keeps_what_option_ii_says(eta_g: float) -> None:
    users = Users()

    found = users.run(algorithms.build("scaffold", users.objective, **TRAINING, eta_g=eta_g), ROUNDS)

    x, c, own = users.theta, np.zeros(4), np.zeros((3, 4))
    for number in range(1, ROUNDS + 1):
        left, new = [], []
        for user in range(3):
            y = x
            for step in range(STEPS):
                g = users.gradient(user, y, users.batch(user, number, step, BATCH))
                y = y - LR * (g - own[user] + c)
            left.append(y - x)
            new.append(own[user] - c + (x - y) / (STEPS * LR))
        x = x + eta_g * np.mean(left, axis=0)
        c, own = c + np.mean(np.array(new) - own, axis=0), np.array(new)
        done = found[number - 1]
        _same(flat(done.weights), x)
        _same(state_vector(done, "c"), c)


def test_local_amsgrad_divides_by_a_shared_vhat() -> None:
    users, beta1, beta2, eps = Users(), 0.8, 0.7, 1e-3
    options = {"beta1": beta1, "beta2": beta2, "eps": eps}

    found = users.run(algorithms.build("local_amsgrad", users.objective, **TRAINING, **options), ROUNDS)

    xs = [users.theta] * 3
    m, v, vhat = np.zeros((3, 4)), np.zeros((3, 4)), np.full(4, eps)
    for t in range(1, ROUNDS * STEPS + 1):
        number, step = 1 + (t - 1) // STEPS, (t - 1) % STEPS
        for user in range(3):
            g = users.gradient(user, xs[user], users.batch(user, number, step, BATCH))
            m[user] = beta1 * m[user] + (1 - beta1) * g
            v[user] = beta2 * v[user] + (1 - beta2) * g**2
        if t % STEPS == 0:
            vhat = np.maximum(vhat, v.mean(axis=0))
        xs = [x - LR * mi / np.sqrt(vhat) for x, mi in zip(xs, m, strict=True)]
        if t % STEPS == 0:
            xs = [np.mean(xs, axis=0)] * 3
            done = found[number - 1]
            _same(flat(done.weights), xs[0])
            _same(state_vector(done, "vhat"), vhat)


def test_mimeadam_freezes_the_servers_statistics() -> None:
    users, beta1, beta2, tau = Users(), 0.8, 0.7, 0.05
    options = {"beta1": beta1, "beta2": beta2, "tau": tau}

    found = users.run(algorithms.build("mimeadam", users.objective, **TRAINING, **options), 2 * ROUNDS)

    x, m, v = users.theta, np.zeros(4), np.full(4, tau**2)
    for turn in range(ROUNDS):
        gathered, done = found[2 * turn], found[2 * turn + 1]
        c = np.mean([users.gradient(user, x) for user in range(3)], axis=0)
        _same(state_vector(gathered, "c"), c)
        _same(flat(gathered.weights), x)
        left = []
        for user in range(3):
            y = x
            for step in range(STEPS):
                rows = users.batch(user, done.number, step, BATCH)
                u = users.gradient(user, y, rows) - users.gradient(user, x, rows) + c
                y = y - LR * ((1 - beta1) * u + beta1 * m) / (np.sqrt(v) + tau)
            left.append(y)
        x = np.mean(left, axis=0)
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c**2
        _same(flat(done.weights), x)
        _same(state_vector(done, "m"), m)
        _same(state_vector(done, "v"), v)


def test_mimelite_leaves_out_the_correction_and_needs_one_exchange() -> None:
    users, beta1, beta2, tau = Users(), 0.8, 0.7, 0.05
    options = {"beta1": beta1, "beta2": beta2, "tau": tau}

    found = users.run(algorithms.build("mimelite", users.objective, **TRAINING, **options), ROUNDS)

    x, m, v = users.theta, np.zeros(4), np.full(4, tau**2)
    for number in range(1, ROUNDS + 1):
        c = np.mean([users.gradient(user, x) for user in range(3)], axis=0)
        left = []
        for user in range(3):
            y, first = x, -(-users.sizes[user] // BATCH)
            for step in range(first, first + STEPS):
                g = users.gradient(user, y, users.batch(user, number, step, BATCH))
                y = y - LR * ((1 - beta1) * g + beta1 * m) / (np.sqrt(v) + tau)
            left.append(y)
        x = np.mean(left, axis=0)
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c**2
        done = found[number - 1]
        _same(flat(done.weights), x)
        _same(state_vector(done, "m"), m)
        _same(state_vector(done, "v"), v)


@pytest.mark.parametrize("keep", [False, True])
def test_adamw_corrects_the_bias_and_decays_kernels_only(keep: bool) -> None:
    users, beta1, beta2, eps, decay = Users(), 0.8, 0.7, 1e-6, 0.1
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay, "keep": keep}

    found = users.run(algorithms.build("adamw", users.objective, **TRAINING, **options), ROUNDS)

    x, kernel = users.theta, np.array([1.0, 1.0, 1.0, 0.0])
    m, v, t = np.zeros((3, 4)), np.zeros((3, 4)), 0
    for number in range(1, ROUNDS + 1):
        if not keep:
            m, v, t = np.zeros((3, 4)), np.zeros((3, 4)), 0
        left = []
        for user in range(3):
            y = x
            for step in range(STEPS):
                g = users.gradient(user, y, users.batch(user, number, step, BATCH))
                m[user] = beta1 * m[user] + (1 - beta1) * g
                v[user] = beta2 * v[user] + (1 - beta2) * g**2
                mhat = m[user] / (1 - beta1 ** (t + step + 1))
                vhat = v[user] / (1 - beta2 ** (t + step + 1))
                y = y - LR * (mhat / (np.sqrt(vhat) + eps) + decay * kernel * y)
            left.append(y)
        x, t = np.mean(left, axis=0), t + STEPS
        _same(flat(found[number - 1].weights), x)


def test_local_only_trains_on_from_its_own_model_and_sends_nothing() -> None:
    users = Users()

    found = users.run(algorithms.build("local", users.objective, **TRAINING), ROUNDS)

    own = [users.theta] * 3
    for number in range(1, ROUNDS + 1):
        own = [_sgd(users, user, own[user], number) for user in range(3)]
        done = found[number - 1]
        assert not any(done.updates.values())
        _same(flat(done.weights), users.theta)
        for user in range(3):
            kept = {name.removeprefix("model."): value for name, value in done.carries[user].items()}
            _same(flat(kept), own[user])
