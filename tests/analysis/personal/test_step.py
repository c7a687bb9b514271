"""The step that adapts: plain SGD on what travels, whatever a tier holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edgefl.algorithms.personal.personalize import personalize
from edgefl.algorithms.quantized.binary import binarized
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.models.zoo.basic import bilstm
from edgefl.objective.derivatives import counting
from edgefl.objective.objective import Objective
from edgefl.submodels.catalog import build
from tests.analysis.personal.users import BATCH, personal, whole
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.support.arrays import as_tensors, weights_of
from tests.support.reference import run_round


def _given(name: str, alpha: float = 0.1) -> tuple[Tensors, Tensors]:
    """(batch and scalars, weights) of a small model."""
    spec = tiny(name)
    x, y = samples(spec, BATCH)
    given = {"batch.0.x": x, "batch.0.y": y, "hyper.alpha": torch.tensor(alpha)}
    return given, dict(spec.weights)


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet8", "resnet8 static"])
def test_a_step_is_that_of_plain_sgd_bit_for_bit(model: str) -> None:
    _, algorithm = whole(model)
    given, weights = _given(model)
    step = algorithm.personalize
    assert step is not None

    after = select(step(given | prefixed("weights", weights)), "weights")

    batch = {name: given[name] for name in ("batch.0.x", "batch.0.y")}
    short = run_round(_one_step(algorithm), weights, lambda _function, _step: batch, hyper={"lr": 0.1})
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], short.update[name]) for name in after)


def _one_step(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, phases=(replace(algorithm.phases[0], steps=1),))


def test_one_gradient_is_taken() -> None:
    _, algorithm = whole()
    given, weights = _given("mlp")
    assert algorithm.personalize is not None

    with counting() as counts:
        algorithm.personalize(given | prefixed("weights", weights))

    assert (counts.gradients, counts.products) == (1, 0)


def test_of_an_importance_tier_the_values_move_and_the_mask_stays() -> None:
    spec = tiny("cnn")
    submodel = build(spec, "importance", gamma=0.25)
    algorithm = personal(submodel)
    arrays = submodel.place(weights_of(spec), 1).payload
    payload = as_tensors(arrays)
    given, _ = _given("cnn")
    assert algorithm.personalize is not None

    after = select(algorithm.personalize(given | prefixed("weights", payload)), "weights")

    assert after.keys() == payload.keys()
    moved = {name for name in payload if not torch.equal(after[name], payload[name])}
    assert "submodel.values" in moved
    assert not moved & {"submodel.mask", "submodel.theta"}


def test_moving_statistics_follow_the_batch() -> None:
    _, algorithm = whole("resnet8")
    given, weights = _given("resnet8")
    assert algorithm.personalize is not None

    after = select(algorithm.personalize(given | prefixed("weights", weights)), "weights")

    statistics = [name for name in weights if name.endswith("running_mean")]
    assert statistics
    assert all(not torch.equal(after[name], weights[name]) for name in statistics)


def test_dropout_draws_from_the_noise_that_it_is_given() -> None:
    spec = bilstm(length=8, vocabulary=20, features=6, hidden=5, rate=0.5, seed=1)
    step = personalize(Objective.of(build(spec, "output_side", cut=0)), 4)
    tensors = step.example(0)
    noise = [name for name in step.inputs if name.startswith("noise.")]
    assert noise

    kept, dropped = (
        step(tensors | {name: torch.full_like(tensors[name], value) for name in noise})["metric.loss"]
        for value in (0.99, 0.01)
    )

    assert not torch.equal(kept, dropped)


def test_binary_weights_are_adapted_as_they_are_read() -> None:
    """With the objective that evaluation has, the gradient is that at the binary weights."""
    objective = Objective.of(build(tiny("mlp"), "output_side", cut=0))
    given, weights = _given("mlp")
    tensors = given | prefixed("weights", weights)

    plain, binary = (personalize(each, BATCH)(tensors) for each in (objective, binarized(objective)))

    assert not torch.equal(plain["metric.loss"], binary["metric.loss"])
    assert set(plain) == set(binary)
