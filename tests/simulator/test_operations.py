"""What is simulated is a shorter list of operations, and gives what the functions give."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import edgefl
from benchmarks.workers.simulation import pfl_cnn
from edgefl.config import Federation, parse
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.setup.data import open_data
from edgefl.setup.tiers import completed
from edgefl.simulator.functions import Functions, SimulationPlan, compile_list, record_function
from edgefl.simulator.operations.layout import pools_channels_last
from edgefl_export.capture.graph import graph_of
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, refuses


def federation(model: str, hidden: int = 8, **changes: dict[str, object]) -> Federation:
    tables: dict[str, dict[str, object]] = {
        "federation": {"name": "operations", "rounds": 2},
        "model": {"name": model, "options": {"hidden": [hidden]} if model == "mlp" else {}},
        "algorithm": {"batch": 4, "steps": 2},
        "data": {"name": "digits", "train_samples": 120, "test_samples": 50},
        "round": {"fraction": 0.5},
        "tiers": {"all": {"count": 12}},
    }
    changed = {key: {**tables.get(key, {}), **value} for key, value in changes.items()}
    return completed(parse({**tables, **changed}, source="the test"))


def functions(chosen: Federation) -> list[Functions]:
    """Of each exchange."""
    return [*SimulationPlan.of(chosen, open_data(chosen)).functions.values()]


def first(chosen: Federation) -> Functions:
    return functions(chosen)[0]


def anything(function: Function) -> Tensors:
    draw = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, spec.below or 10, spec.shape, generator=draw)
        if not spec.dtype.is_floating_point
        else torch.rand(spec.shape, generator=draw) - (0.0 if role_of(name) == "noise" else 0.4)
        for name, spec in function.inputs.items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "algorithm"),
    mostly_slow(
        product(("mlp", "cnn", "resnet8"), ("sgd", "scaffold", "fafed")),
        [("mlp", "scaffold"), ("cnn", "fafed"), ("resnet8", "sgd")],
    ),
)
def test_a_list_gives_what_its_function_gives(model: str, algorithm: str) -> None:
    exchanges = functions(federation(model, algorithm={"name": algorithm}, round={"fraction": 1.0}))
    for function in [function for each in exchanges for function in each.named.values()]:
        given = anything(function)
        wanted = function({name: value.clone() for name, value in given.items()})
        found = record_function(function, 1)({name: value.clone() for name, value in given.items()})
        assert [*found] == [*wanted]
        for name, value in wanted.items():
            scale = max(1.0, float(value.abs().max()))
            np.testing.assert_allclose(found[name], value.detach(), atol=2e-5 * scale, err_msg=name)


@pytest.mark.slow
def test_statistics_of_batches_are_as_exact_as_those_of_the_function() -> None:
    function = first(federation("resnet8", algorithm={"batch": 64})).named["train"]
    given = anything(function)
    exact = {name: each.double() if each.is_floating_point() else each for name, each in given.items()}
    wanted = function({name: each.clone() for name, each in exact.items()})
    found = record_function(function, 1)({name: each.clone() for name, each in given.items()})
    apart = function({name: each.clone() for name, each in given.items()})

    def error(of: Tensors) -> float:
        return max(
            float((of[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()
        )

    assert error(found) < 2 * error(apart)


def test_dropout_pools_and_dense_layers_keep_their_values_in_other_forms() -> None:
    model = pfl_cnn().train(False)
    weights = dict(model.named_parameters())

    def step(inputs: Tensors) -> Tensors:
        own = {name: inputs[f"state.{name}"].requires_grad_() for name in weights}
        x = F.relu(F.conv2d(inputs["batch.0.x"], own["0.weight"], own["0.bias"]))
        x = F.max_pool2d(F.relu(F.conv2d(x, own["2.weight"], own["2.bias"])), 2)
        x = torch.where(inputs["noise.drop"] >= 0.25, x / 0.75, torch.zeros_like(x)).flatten(1)
        x = F.linear(F.relu(F.linear(x, own["7.weight"], own["7.bias"])), own["10.weight"], own["10.bias"])
        loss = F.cross_entropy(x, inputs["batch.0.y"])
        gradients = torch.autograd.grad(loss, [*own.values()])
        steps = zip(own.items(), gradients, strict=True)
        new = {f"state.{name}": value - inputs["hyper.lr"] * gradient for (name, value), gradient in steps}
        return {**new, "metric.loss": loss.detach()}

    ports = {f"state.{name}": TensorSpec.of(value) for name, value in weights.items()} | {
        "batch.0.x": TensorSpec((5, 3, 32, 32)),
        "batch.0.y": TensorSpec((5,), torch.int64),
        "noise.drop": TensorSpec((5, 64, 14, 14)),
        "hyper.lr": TensorSpec(()),
    }
    function = Function("train", step, ports)
    given = anything(function) | {f"state.{name}": value.detach() for name, value in weights.items()}
    wanted = step({name: value.clone() for name, value in given.items()})
    found = record_function(function, 1)({name: value.clone() for name, value in given.items()})
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.detach(), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("channels", [3, 32])
def test_pools_in_channels_last_give_the_same_bits_and_layout(channels: int) -> None:
    def pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])

    x = torch.randn(4, channels, 11, 12, generator=torch.Generator().manual_seed(3)).relu()
    module = graph_of(pools, [x], {}, fake=True)
    pools_channels_last(module)
    for found, wanted in zip(compile_list(module)(x), pools(x), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_a_step_writes_over_its_own_state_and_nothing_else() -> None:
    found = first(federation("mlp", algorithm={"momentum": 0.9}))
    start, train = (record_function(found.named[name], 1) for name in ("start", "train"))
    given = anything(found.named["start"])
    before = {name: value.clone() for name, value in given.items()}
    state = start(given)
    again = start(given)
    train(anything(found.named["train"]) | state)
    assert all(torch.equal(given[name], value) for name, value in before.items())
    name = next(iter(state))
    assert not torch.equal(state[name], again[name])


def test_together_is_chosen_by_the_model_and_by_what_a_round_wants() -> None:
    def chosen(hidden: int, clients: int = 12) -> int:
        return first(federation("mlp", hidden, tiers={"all": {"count": clients}})).together

    assert (chosen(8), chosen(8, clients=40), chosen(2048)) == (6, 10, 1)
    assert first(federation("cnn")).together == 1  # it has convolutions


@pytest.mark.slow
def test_bfloat16_trains_to_about_the_same(tmp_path: Path) -> None:
    exact = edgefl.simulate(federation("cnn"), tmp_path / "exact")
    coarse = edgefl.simulate(federation("cnn", simulation={"precision": "bfloat16"}), tmp_path / "coarse")
    differ = [np.abs(coarse.model[name] - value).max() for name, value in exact.model.items()]
    assert 1e-6 < max(differ) < 0.05
    assert all(value.dtype == np.float32 for value in coarse.model.values())


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_on_another_device_nothing_is_left_on_the_processor(model: str) -> None:
    """``meta`` has no values, and refuses tensors of any other device."""
    function = first(federation(model)).named["train"]
    device = torch.device("meta")
    found = record_function(function, 1, device=device)(
        {name: value.to(device) for name, value in anything(function).items()}
    )
    assert {value.device for value in found.values()} == {device}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with refuses(ConfigError, device="cuda"):
        edgefl.simulate(federation("mlp", simulation={"device": "cuda"}), tmp_path)
