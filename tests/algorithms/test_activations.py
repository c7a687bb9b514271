"""Steps whose gradients read halves of what the forward pass made, and nothing else that is rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.activations import LEAST_ENTRIES, store_activations
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, select
from edgefl.errors import ConfigError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import trace
from tests.exporters.examples import pointwise

BATCH, HIDDEN = 256, 64


def algorithm(name: str = "sgd", **options: object) -> Algorithm:
    model = build_model("mlp", size=8, hidden=(HIDDEN,), classes=3)
    return algorithms.build(name, Objective.of(OutputSide(model, 0)), batch=BATCH, **options)


def halves(function: Function) -> list[fx.Node]:
    """What the first graph of a function makes in float16."""
    nodes = trace(function).module.graph.nodes
    return [node for node in nodes if node.kwargs.get("dtype") is torch.float16]


def of_one_step(function: Function) -> Function:
    """The function as the only step of an algorithm whose values wait in halves."""
    phase = Phase("train", function, 1)
    made = Algorithm("own", function, (phase,), function, function)
    return store_activations(made, "float16").phases[0].function


def rounded(x: Tensor) -> Tensor:
    return x.half().float()


def test_gradients_read_halves_and_the_loss_is_what_it_was() -> None:
    plain = algorithm(momentum=0.0, weight_decay=0.0)
    step, half = plain.phases[0].function, store_activations(plain, "float16").phases[0].function
    example = step.example(0)
    weights = select(example, "state.weights")
    x, y = example["batch.0.x"].flatten(1), example["batch.0.y"]

    hidden = F.relu(x @ weights["dense1.dense.weight"].T + weights["dense1.dense.bias"])
    logits = hidden @ weights["head.dense.weight"].T + weights["head.dense.bias"]
    loss = F.cross_entropy(logits, y)
    at_logits = (logits.softmax(1) - F.one_hot(y, 3)) / BATCH
    expected = example["state.weights.head.dense.weight"] - example["hyper.lr"] * (
        at_logits.T @ rounded(hidden)
    )
    found = half({name: value.clone() for name, value in example.items()})

    torch.testing.assert_close(found["metric.loss"], loss)
    torch.testing.assert_close(found["state.weights.head.dense.weight"], expected, rtol=0, atol=6e-8)
    unrounded = step({name: value.clone() for name, value in example.items()})
    gap = (
        (found["state.weights.head.dense.weight"] - unrounded["state.weights.head.dense.weight"]).abs().max()
    )
    assert gap > 1e-7


def test_weights_the_batch_and_what_is_small_wait_as_they_are() -> None:
    assert BATCH * HIDDEN >= LEAST_ENTRIES > 64 * HIDDEN
    (only,) = halves(store_activations(algorithm(), "float16").phases[0].function)
    assert only.meta["val"].shape == (BATCH, HIDDEN)


def test_a_value_and_its_views_have_one_store() -> None:
    def fn(tensors: Tensors) -> Tensors:
        def loss(w: Tensor) -> Tensor:
            made = (tensors["batch.0.x"] * w).tanh()
            return (made.view(-1, 8) * made.view(-1, 8).sin()).sum() + (made.t() * made.t()).sum()

        return {"state.w": torch.func.grad(loss)(tensors["state.w"])}

    plain = pointwise(fn, **{"state.w": (), "batch.0.x": (128, 64)})

    roots = {node.args[0].name for node in halves(of_one_step(plain))}
    assert sum(name.startswith("tanh") for name in roots) == 1
    assert not any("view" in name or name.startswith("t_") for name in roots)


def test_a_maximum_is_looked_for_where_its_gradient_looks_for_it() -> None:
    def fn(tensors: Tensors) -> Tensors:
        def loss(w: Tensor) -> Tensor:
            return F.max_pool2d(tensors["batch.0.x"] * w, 2).sum()

        return {"state.w": torch.func.grad(loss)(tensors["state.w"]), "metric.loss": loss(tensors["state.w"])}

    x = torch.full((1, 1, 128, 128), 1.0)
    x[..., 1::2] = 1.0 + 2.0**-12  # the same half: the first of both is the maximum
    w = torch.tensor(1.0)
    found = of_one_step(pointwise(fn, **{"state.w": (), "batch.0.x": (1, 1, 128, 128)}))(
        {"state.w": w, "batch.0.x": x}
    )
    assert found["metric.loss"] == found["state.w"] == 64 * 64


def test_only_steps_store_halves() -> None:
    plain = algorithm("fafed")
    half = store_activations(plain, "float16")
    assert len(half.exchanges) == len(plain.exchanges) > 1
    for before, after in zip(plain.exchanges, half.exchanges, strict=True):
        assert all(halves(phase.function) for phase in after.phases)
        assert all(phase.function.activations == "float16" for phase in after.phases)
        assert (after.start, after.finish, after.evaluate) == (before.start, before.finish, before.evaluate)


@pytest.mark.parametrize("mode", ["exact", "fo"])
def test_second_derivatives_read_halves_too(mode: str) -> None:
    step = store_activations(algorithm("per_fedavg", mode=mode), "float16").phases[0].function
    out = step(step.example(0))
    assert halves(step) and all(value.isfinite().all() for value in out.values())


def test_what_no_value_can_be_stored_as_is_told() -> None:
    assert store_activations(algorithm(), "float32").phases[0].function.activations == "float32"
    with pytest.raises(ConfigError, match=r"as 'bfloat16'; choose one of float32, float16"):
        store_activations(algorithm(), "bfloat16")


def test_ports_and_examples_are_those_of_the_step() -> None:
    plain = algorithm()
    half = store_activations(plain, "float16").phases[0].function
    assert dict(half.inputs) == dict(plain.phases[0].function.inputs)
    assert all(isinstance(spec, TensorSpec) for spec in trace(half).outputs.values())
