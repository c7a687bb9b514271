"""FIARSE invariants 16 to 18: what a client's result depends on, in torch, from the graphs and on the device runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgefl.contract.tensors import Tensors
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec
from edgefl.submodels.importance.carrier import VALUES
from edgefl.submodels.importance.submodel import Importance, importance
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from tests.invariants.fiarse.training import (
    LR,
    STEPS,
    Client,
    arrays_of,
    batches_of,
    blobs_for,
    bundle_of,
    client,
    drawn_batches,
    multiplied,
    simulate,
    small_bundle,
    small_net,
    train_on_device,
)
from tests.parity.rounds import local_data
from tests.rings.rows import mostly_slow

GAMMA, SEED = 0.3, 11
NAN = float("nan")
OPTIMIZERS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "freeze_dropped": False}]


@pytest.fixture(scope="module")
def submodel() -> Importance:
    return importance(small_net(), gamma=GAMMA)


# 16. Poison


def poisoned(state: Tensors, poison: float) -> Tensors:
    """The same state with ``poison`` in every entry that was not sent."""
    masks = {name.removeprefix("gate.mask."): m for name, m in state.items() if name.startswith("gate.mask.")}
    assert sum(bool((~mask).any()) for mask in masks.values()) >= 3
    return state | {
        f"weights.{name}": torch.where(mask, state[f"weights.{name}"], poison) for name, mask in masks.items()
    }


def same(one: Tensors, other: Tensors) -> bool:
    """Equal in every bit, so that NaN equals NaN."""
    return all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one | other)


def rounds(device: Client, submodel: Importance, poison: float) -> Iterator[tuple[Tensors, Tensors]]:
    """(state, metrics) of a clean and of a poisoned round, step by step."""
    clean = device.begin(submodel.place(arrays_of(submodel.spec), 1).payload)
    other = poisoned(clean, poison)
    metrics, told = {}, {}
    yield clean | metrics, other | told
    for batch in batches_of(submodel.spec, 3):
        (clean, metrics), (other, told) = device.step(clean, batch, LR), device.step(other, batch, LR)
        yield clean | metrics, other | told


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("engine", "options", "poison"),
    mostly_slow(
        [("torch", options, poison) for options in OPTIMIZERS for poison in (1e6, NAN)]
        + [("onnx", OPTIMIZERS[0], NAN), ("onnx", OPTIMIZERS[1], NAN), ("onnx", OPTIMIZERS[2], 1e6)],
        [("torch", options, poison) for options in OPTIMIZERS for poison in (1e6, NAN)],
    ),
)
def test_inv16_what_was_not_sent_changes_nothing_and_is_not_changed(
    submodel: Importance, engine: str, options: dict[str, Any], poison: float
) -> None:
    device = client(engine, GAMMA, **options)
    for clean, other in rounds(device, submodel, poison):
        assert clean.get("loss") == other.get("loss") and clean.get("correct") == other.get("correct")
        assert same(device.update(clean), device.update(other))
        for name in submodel.carrier.maskable:
            unsent = other[f"weights.{name}"][~clean[f"gate.mask.{name}"]]
            assert same({"x": unsent}, {"x": torch.full_like(unsent, poison)}), (
                "Delta outside M0 is exactly 0"
            )
        assert same(
            {n: clean[f"weights.{n}"] for n in submodel.carrier.dense},
            {n: other[f"weights.{n}"] for n in submodel.carrier.dense},
        )


def test_inv16_the_client_is_the_simulation_on_poisoned_copies(
    submodel: Importance,
) -> None:
    found, batches = submodel.cut_of(arrays_of(submodel.spec)), batches_of(submodel.spec, 3)
    results = []
    for poison in (0.0, 1e6, float("nan")):
        weights = {
            name: torch.where(torch.from_numpy(found.masks[name]), tensor, poison)
            if name in found.masks
            else tensor
            for name, tensor in submodel.spec.weights.items()
        }
        after = simulate(submodel.spec, found.masks, found.theta, batches, LR, weights=weights)
        results.append(
            {n: t[torch.from_numpy(found.masks[n])] if n in found.masks else t for n, t in after.items()}
        )
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_inv16_multiplying_by_the_mask_fails_on_nan(submodel: Importance) -> None:
    """NaN * 0 is NaN, so a product lets it through where a selection does not; 1e6 * 0 is 0, which shows nothing."""
    wrong = Client.of(multiplied({}, small_net(), GAMMA))
    *_, (clean, other) = rounds(wrong, submodel, 1e6)
    assert same(wrong.update(clean), wrong.update(other))
    *_, (clean, other) = rounds(wrong, submodel, float("nan"))
    assert clean["loss"].isfinite() and other["loss"].isnan()
    assert not same(wrong.update(clean), wrong.update(other))


# 17. What the result depends on


def bits_of(update: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in update.items()}


def test_inv17_a_result_depends_on_its_inputs_only(submodel: Importance, tmp_path: Path) -> None:
    weights, bundle = arrays_of(submodel.spec), small_bundle(GAMMA)
    masks = submodel.cut_of(weights).masks
    elsewhere = {
        name: np.where(masks[name], array, array / 2) if name in masks else array
        for name, array in weights.items()
    }
    assert any(not np.array_equal(weights[name], elsewhere[name]) for name in weights)

    def update(name: str, source: Arrays, seed: int = SEED, samples: int = 5) -> dict[str, bytes]:
        published = blobs_for(bundle, submodel.place(source, 1), source)
        drawn = local_data(submodel.spec, 21, seed=samples)
        return bits_of(train_on_device(bundle, published, drawn, seed, tmp_path / name))

    assert blobs_for(bundle, submodel.place(weights, 1), weights) == blobs_for(
        bundle, submodel.place(elsewhere, 2), elsewhere
    )
    first = update("first", weights)
    assert first == update("again", elsewhere)
    assert first != update("other seed", weights, seed=SEED + 1)
    assert first != update("other data", weights, samples=6)
    moved = {name: array * np.float32(1.01) for name, array in weights.items()}
    assert first != update("other payload", moved)


# What is not trained travels down only


def half_frozen() -> ModelSpec:
    """The small net with a body that is not trained, and a batch norm with moving statistics beside it."""
    spec = small_net()
    spec.module.body.requires_grad_(False)
    spec.module.stem[1] = BatchNorm(4, mode="global")
    spec.module.stem[1].bias.requires_grad_(False)
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_untrained_parameters_travel_down_only(tmp_path: Path, options: dict[str, Any]) -> None:
    submodel = importance(half_frozen(), gamma=GAMMA)
    frozen = {"stem.1.bias", "body.0.weight", "body.1.weight", "body.1.bias"}
    statistics = {"stem.1.running_mean", "stem.1.running_var"}
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    assert frozen | statistics < submodel.carrier.dense.keys()

    placement = submodel.place(weights, 1)
    bundle = bundle_of(submodel, "weak", steps=STEPS, lr=LR, **options)
    update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, SEED, tmp_path)

    assert frozen < placement.payload.keys()
    assert update.keys() == placement.regions.keys() == {VALUES, "stem.1.weight", *statistics}
    assert all(np.abs(update[name] - weights[name]).max() > 1e-4 for name in statistics)


# 18. The sparse client and the dense simulation


@pytest.mark.parametrize("strategy", mostly_slow(["model", "layer"], ["model"]))
def test_inv18_a_sparse_payload_equals_the_dense_simulation(tmp_path: Path, strategy: str) -> None:
    submodel = importance(small_net(), gamma=GAMMA, strategy=strategy)
    bundle = small_bundle(GAMMA) if strategy == "model" else bundle_of(submodel, "weak", steps=STEPS, lr=LR)
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    placement = submodel.place(weights, 1)
    found = submodel.cut_of(weights)

    update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, SEED, tmp_path)

    after = simulate(submodel.spec, found.masks, found.theta, drawn_batches(data, SEED, STEPS), LR)
    dense = {name: tensor.numpy() for name, tensor in after.items()}
    expected = extract(dense, placement.regions)
    before = extract(weights, placement.regions)
    assert update.keys() == expected.keys() == {VALUES, *submodel.carrier.dense}
    for name, value in expected.items():
        np.testing.assert_allclose(update[name], value, atol=1e-6, rtol=1e-6, err_msg=name)
        assert np.abs(value - before[name]).max() > 1e-3, "it has trained"
    for name, mask in found.masks.items():
        assert dense[name][~mask].tobytes() == weights[name][~mask].tobytes()


@pytest.mark.slow
def test_inv18_a_device_that_holds_everything_equals_plain_training(tmp_path: Path) -> None:
    submodel = importance(small_net(), gamma=1.0)
    bundle = small_bundle(1.0)
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    update = train_on_device(
        bundle, blobs_for(bundle, submodel.place(weights, 1), weights), data, SEED, tmp_path
    )
    expected = simulate(submodel.spec, {}, {}, drawn_batches(data, SEED, STEPS), LR)
    assert update.keys() == weights.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(update[name], tensor.numpy(), atol=1e-6, rtol=1e-6, err_msg=name)
