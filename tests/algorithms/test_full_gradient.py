"""A pass over the data: the mean gradient of all samples, whatever the size of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edgefl import algorithms
from edgefl.contract.server import state_of
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.derivatives import counting
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.algorithms.users import SEED, Users, flat
from tests.support.reference import Client, RoundResult, drawn, run_round


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

    with counting() as counts:
        feed = drawn(algorithm, client, 0, 1)
        run_round(algorithm, users.spec.weights | server_state, feed, samples=client.samples)

    assert (counts.gradients, counts.products) == (gradients, 0)
