"""Every baseline's rounds against a loop in plain numpy that reads like its formula (fafed.md 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.codecs.binarize import StepSize, draw
from edgefl.contract.server import state_of
from edgefl.contract.tensors import Tensors
from edgefl.models.exits import with_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.derivatives import count_derivatives
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.algorithms.users import SEED, Users, Vector, flat, state_vector
from tests.support.reference import Client, RoundResult, begun, drawn, federated, run_round

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


# -- A pass over the data: the mean gradient of all samples, whatever the size of a batch ------------------


def _gathered(users: Users, user: int, batch: int, *, masked: bool = True) -> RoundResult:
    exchange = algorithms.build("mimeadam", users.objective, batch=batch, steps=1).ahead[0]
    if not masked:
        (phase,) = exchange.phases
        everything = {"batch.0.mask": torch.ones(batch, dtype=torch.float64)}
        step = replace(phase.function, fn=lambda tensors: phase.function.fn(tensors | everything))
        exchange = replace(exchange, phases=(replace(phase, function=step),))
    client = users.clients[user]
    feed = drawn(exchange, client, SEED, 1)
    return run_round(exchange, users.spec.weights, feed, samples=client.samples)


@pytest.mark.parametrize("batch", [1, 4, 5, 12, 40])
@pytest.mark.parametrize("user", [0, 1])
def test_every_sample_counts_once_however_they_fall_into_batches(user: int, batch: int) -> None:
    users = Users()

    result = _gathered(users, user, batch)

    np.testing.assert_allclose(
        flat(state_of(result.update, "c")), users.gradient(user, users.theta), rtol=1e-12
    )
    assert len(result.metrics) == -(-users.sizes[user] // batch)


def test_without_the_mask_filling_rows_would_count_twice() -> None:
    users = Users()

    wrong = flat(state_of(_gathered(users, 0, 4, masked=False).update, "c"))

    assert np.abs(wrong - users.gradient(0, users.theta)).max() > 1e-2


def test_the_mean_loss_of_the_pass_is_over_the_samples_that_count() -> None:
    users = Users()
    client = users.clients[0]

    last = _gathered(users, 0, 4).metrics[-1]

    residual = client.x[4:7] @ users.spec.weights["line.weight"].T + users.spec.weights["line.bias"]
    torch.testing.assert_close(last["loss"], (residual - client.y[4:7]).square().mean())


def test_batch_norm_normalises_by_the_batch_and_its_statistics_stay() -> None:
    spec = build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4, generator=generator), torch.arange(6) % 3
    objective = Objective.of(OutputSide(spec, 0))
    lite = algorithms.build("mimelite", objective, batch=6, steps=0)

    update = run_round(lite, _with_memory(spec.weights, objective), _never, samples={"x": x, "y": y}).update

    module = spec.module.train()
    torch.nn.functional.cross_entropy(module(x), y).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(update[f"c/{name}"], parameter.grad, rtol=1e-4, atol=1e-6)
    fresh = build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3).weights
    for name in objective.fixed:
        torch.testing.assert_close(update[name], fresh[name])


def _with_memory(weights: dict[str, torch.Tensor], objective: Objective) -> dict[str, torch.Tensor]:
    zeros = {
        f"{kept}/{name}": torch.zeros_like(weights[name]) for kept in "mv" for name in objective.trainable
    }
    return {name: tensor.clone() for name, tensor in weights.items()} | zeros


def _never(*_: object) -> dict[str, torch.Tensor]:
    return {}


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("fedavg", 3),
        ("fedavg_matched", 6),
        ("fedprox", 3),
        ("scaffold", 3),
        ("local_amsgrad", 3),
        ("local", 3),
        ("adamw", 3),
        ("mimeadam", 2 * 3),
        ("mimelite", 3 + 2),
    ],
)
def test_gradients_of_a_device_in_the_exchange_that_trains(name: str, gradients: int) -> None:
    users = Users((7,))
    algorithm = algorithms.build(name, users.objective, batch=4, steps=3)
    server_state = {
        f"{state}/{each}": torch.ones(1) for state in algorithm.server_state for each in users.spec.weights
    }
    client: Client = users.clients[0]

    with count_derivatives() as counts:
        feed = drawn(algorithm, client, 0, 1)
        run_round(algorithm, users.spec.weights | server_state, feed, samples=client.samples)

    assert (counts.gradients, counts.products) == (gradients, 0)


# -- A simulation of float64 weights and samples computes in float64 -------------------------------------------


EXACT = {"aten._to_copy.default"}
"""Of whole numbers, on their way to bytes."""
CODED = [
    "fedbat",
    *(name for name in codecs.CODECS if name not in ("dense", "fedbat", "zerofl", "bifl", "bifl_full")),
]
COUNT = "correct"
"""How many samples were right, float32 by contract."""
OPTIONS: Mapping[str, dict[str, Any]] = {
    "multi_exit": {"kd_weight": 0.3},
    "adamw": {"keep": True},
    "fedbat": {"alpha_range": [5e-4, 5e-2]},
}


class Rounded(TorchDispatchMode):
    """Names of the operations that read float64 and give float32."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {value.dtype for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = {value.dtype for value in tree_leaves(out) if isinstance(value, Tensor)}
        if torch.float64 in given and torch.float32 in made:
            self.names.add(str(func))
        return out


def objective_of(algorithm: str) -> Objective:
    if algorithm == "fedbn":
        return Objective.of(OutputSide(build_model("fedbat_cnn", size=4, widths=(3, 4), classes=3), 0))
    plain = build_model("mlp", size=4, hidden=[5, 4] if algorithm == "multi_exit" else [5], classes=3)
    return Objective.of(OutputSide(with_exits(plain) if algorithm == "multi_exit" else plain, 0))


def clients() -> Iterator[Client]:
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        x = torch.randn(8, 1, 4, 4, generator=generator, dtype=torch.float64)
        yield Client(number, x, torch.randint(0, 3, (8,), generator=generator))


def doubled(objective: Objective) -> Tensors:
    return {name: tensor.double() for name, tensor in objective.suffix.state_dict().items()}


def wider(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the floats that are not float64."""
    return {
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype != torch.float64
    }


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedbat"])
def test_a_federation_of_float64_rounds_nothing_to_float32(name: str) -> None:
    objective = objective_of(name)
    algorithm = algorithms.build(name, objective, batch=4, steps=2, **OPTIONS.get(name, {}))

    with Rounded() as rounded:
        done = list(
            federated(algorithm, doubled(objective), [*clients()], rounds=2 * len(algorithm.exchanges))
        )

    assert not rounded.names - EXACT
    for each in done:
        assert not wider(each.weights) and not wider(each.server_state)
        assert not any(map(wider, each.updates.values())) and not any(map(wider, each.carries.values()))
        assert all(wider(step) <= {COUNT} for steps in each.steps.values() for step in steps)


@pytest.mark.sample(4)
@pytest.mark.parametrize("codec", CODED)
def test_coding_a_float64_change_rounds_nothing_but_what_travels(codec: str) -> None:
    objective = objective_of("fedavg")
    if codec == "fedbat":
        algorithm = algorithms.build(codec, objective, batch=4, steps=4, **OPTIONS[codec])
    else:
        algorithm = apply_codec(
            codecs.build(codec), algorithms.build("fedavg", objective, batch=4, steps=2), objective
        )
    [client, _] = clients()
    weights, carry = begun(algorithm, doubled(objective)).weights, None

    with Rounded() as rounded:
        for number in (1, 2):
            done = run_round(algorithm, weights, drawn(algorithm, client, 0, number), carry=carry)
            carry = done.carry

    assert not rounded.names - EXACT
    assert not wider(done.carry) and all(wider(step) <= {COUNT} for step in done.metrics)


def test_a_sign_has_the_dtype_of_what_it_stands_for() -> None:
    m, alpha = torch.tensor([0.5], dtype=torch.float64), torch.tensor(1 / 3, dtype=torch.float64)

    told = alpha * draw(m, alpha, torch.zeros(1, dtype=torch.float64))

    assert told.dtype == torch.float64 and float(told) == 1 / 3


def test_a_step_size_at_its_limit_is_the_limit_to_the_last_bit_of_float64() -> None:
    rho, size = torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)
    pull, lr = torch.full((1,), -1e9, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    step_size = StepSize(rho, (1e-3, 0.05))

    moved, _ = step_size.descend(size, torch.zeros_like(size), size, pull, lr)

    torch.testing.assert_close(
        step_size.of(size, moved), torch.tensor([0.05], dtype=torch.float64), rtol=1e-14, atol=0
    )
