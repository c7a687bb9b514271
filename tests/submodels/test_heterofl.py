"""HeteroFL's two flags: the scaler of narrow layers, and the cross-entropy that leaves absent classes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

from edgefl.algorithms import catalog as algorithms
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, role_of, select
from edgefl.models.copies import copy_module
from edgefl.models.losses import CrossEntropy, SequenceCrossEntropy, SquaredError
from edgefl.models.losses.loss import without_absent
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import Width, width
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data.samples import Batches, LabelSpec, LocalData, noise
from tests.parity.rounds import Exported, on_device
from tests.rings.rows import mostly_slow
from tests.submodels.nets import rows
from tests.support.bundles import build_bundle
from tests.support.errors import BundleError, ModelError, refuses
from tests.support.reference import run_round

RATIO = 0.5
HIDDEN = {
    "mlp": ["dense1.dense", "dense2.dense"],
    "cnn": ["conv1.conv", "conv2.conv", "dense1.dense"],
    "resnet8": [
        "stem.conv",
        *(f"block{n}.{layer}" for n in (1, 2, 3) for layer in ("conv1", "conv2", "shortcut.conv")),
    ],
}


def small(name: str) -> ModelSpec:
    options = {
        "mlp": {"size": 6, "hidden": (8, 6)},
        "cnn": {"size": 8},
        "resnet8": {"size": 8, "widths": (4, 6, 8)},
    }
    return build_model(name, classes=5, **options[name], **({"bn": "static"} if name == "resnet8" else {}))


def local(part: Width, seed: int = 0) -> Tensors:
    """The slice's tensors, away from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in part.suffix.state_dict().items()
    }


def batch(spec: ModelSpec, count: int = 6) -> tuple[Tensor, Tensor]:
    return rows(spec.sample, count), torch.arange(count) % 3


# -- the scaler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_in_training_every_hidden_layer_s_output_is_divided_by_the_ratio(name: str) -> None:
    spec = small(name)
    part = catalog.build(spec, "width", ratio=RATIO, scaler=True)
    weights, (x, y) = local(Width(spec, RATIO)), batch(spec)
    params = {key: weights[key].clone().requires_grad_() for key in Objective.of(part).trainable}
    loss, _, _ = Objective.of(part)(params, {}, x, y)
    grads = torch.autograd.grad(loss, list(params.values()))

    scaled = copy.deepcopy(Width(spec, RATIO).suffix).train()
    scaled.load_state_dict(weights)
    for path in HIDDEN[name]:
        scaled.get_submodule(path).register_forward_hook(lambda layer, args, out: out / RATIO)
    expected = F.cross_entropy(scaled(x), y)
    wanted = torch.autograd.grad(expected, list(scaled.parameters()))

    assert {type(layer) for path in HIDDEN[name] for layer in [scaled.get_submodule(path)]} <= {
        nn.Conv2d,
        nn.Linear,
    }
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for found, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
    plain, _, _ = Objective.of(Width(spec, RATIO))(params, {}, x, y)
    # A batch norm behind each layer takes the scale out again.
    assert torch.allclose(loss, plain, atol=1e-6) == (name == "resnet8")


def _pruned(layer: nn.Linear) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.3)
    return layer


@pytest.mark.parametrize("form", [weight_norm, parametrizations.weight_norm, _pruned])
def test_the_scaler_divides_layers_that_compute_their_weight(form: Callable[[nn.Linear], nn.Module]) -> None:
    layers = nn.Linear(4, 8), nn.ReLU(), form(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3)
    spec = split(nn.Sequential(*layers), sample=TensorSpec((4,)), classes=3)
    part, (x, _) = width(spec, ratio=0.5, scaler=True), batch(spec)
    carrier = part.carrier
    assert carrier is not None
    read = carrier.effective(local(part), {}, {}, training=True)

    scaled = copy_module(part.suffix)
    scaled.load_state_dict(local(part))
    for path in ("0", "2"):
        scaled.get_submodule(path).register_forward_hook(lambda layer, args, out: out / 0.5)

    torch.testing.assert_close(torch.func.functional_call(part.suffix, read, (x,)), scaled(x))


def test_the_scaler_refuses_a_hidden_layer_that_no_tensor_scales() -> None:
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    parametrizations.spectral_norm(layers[4])
    sequence = nn.Sequential(*layers)
    spec = split(sequence, sample=TensorSpec((4,)), classes=3)
    assert width(spec, ratio=0.5, scaler=True).carrier is not None

    parametrizations.spectral_norm(layers[2])
    with refuses(ModelError, layer="2", tensor="weight"):
        width(split(sequence, sample=TensorSpec((4,)), classes=3), ratio=0.5, scaler=True)


def test_inference_divides_as_training_does_and_the_update_knows_of_no_scaler() -> None:
    spec = small("cnn")
    part, plain = width(spec, ratio=RATIO, scaler=True), width(spec, ratio=RATIO)
    weights, (x, _) = local(plain), batch(spec)
    scaled = copy.deepcopy(plain.suffix).eval()
    scaled.load_state_dict(weights)
    for path in HIDDEN["cnn"]:
        scaled.get_submodule(path).register_forward_hook(lambda layer, args, out: out / RATIO)

    torch.testing.assert_close(Objective.of(part).predict(weights, x), scaled(x), rtol=1e-5, atol=1e-6)
    assert Objective.of(part).carrier.pack(weights, {}) == weights
    assert part.identity != plain.identity, "tiers that differ in graphs must not share a bundle"


def test_the_whole_model_has_no_scaler() -> None:
    assert width(small("mlp"), ratio=1.0, scaler=True).carrier is None


def test_the_rolling_window_may_be_scaled_too() -> None:
    assert width(small("mlp"), gamma=0.25, scaler=True, rolling=True).carrier is not None


# -- masked cross-entropy --------------------------------------------------------------------------------------


def test_logits_of_absent_classes_become_zero_before_the_softmax() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.0, 1.0, 2.0, -1.0]])
    counts, y = torch.tensor([4, 0, 1, 0]), torch.tensor([0, 2])
    masked = without_absent(CrossEntropy(), logits, counts)
    assert torch.equal(masked, torch.tensor([[1.0, 0.0, 3.0, 0.0], [0.0, 0.0, 2.0, 0.0]]))
    right = torch.log(torch.tensor([np.e**1 + 1 + np.e**3 + 1, 1 + 1 + np.e**2 + 1])) - torch.tensor(
        [1.0, 2.0]
    )
    torch.testing.assert_close(CrossEntropy().each(masked, y), right.to(torch.float32))


def test_a_single_logit_stands_for_the_second_of_two_classes() -> None:
    logit = torch.tensor([[1.5], [-0.5]])
    both, first = (without_absent(CrossEntropy(), logit, torch.tensor(counts)) for counts in ([3, 2], [3, 0]))
    assert torch.equal(both, torch.tensor([[0.0, 1.5], [0.0, -0.5]]))
    assert not first.any()


def test_every_token_is_masked_alike() -> None:
    logits = torch.arange(12.0).reshape(1, 3, 4) + 1
    masked = without_absent(SequenceCrossEntropy(), logits, torch.tensor([0, 1, 1, 1]))
    assert not masked[..., 0].any() and torch.equal(masked[..., 1:], logits[..., 1:])


def test_a_loss_without_classes_cannot_be_masked() -> None:
    spec = small("mlp")
    with pytest.raises(
        ModelError, match="masked_loss and self_distillation need logits of classes, and SquaredError"
    ):
        Objective(spec.module, spec.sample, SquaredError(), masked=True)


@pytest.mark.parametrize(("algorithm", "kind"), [("sgd", "width"), ("tcbgd", "importance")])
def test_absent_classes_get_no_gradient(algorithm: str, kind: str) -> None:
    spec = small("mlp")
    submodel = catalog.build(spec, kind, gamma=0.5)
    built = algorithms.build(
        algorithm, Objective.of(submodel), batch=6, steps=1, weight_decay=0.0, masked_loss=True
    )
    x, y = batch(spec)
    counts = torch.bincount(y, minlength=5)
    fed = {"data.class_counts": counts, "batch.0.x": x, "batch.0.y": y}
    weights = payload(submodel)
    update = run_round(built, weights, lambda function, step: fed).update
    if kind == "width":
        moved = update["head.dense.bias"] != weights["head.dense.bias"]
        assert moved.tolist() == [True, True, True, False, False]
    without = algorithms.build(algorithm, Objective.of(submodel), batch=6, steps=1, weight_decay=0.0)
    plain = run_round(without, weights, lambda function, step: fed).update
    assert any(not torch.equal(update[name], plain[name]) for name in update)


def payload(submodel: Submodel) -> Tensors:
    arrays = {name: tensor.numpy() for name, tensor in submodel.spec.weights.items()}
    return {name: torch.from_numpy(np.array(a)) for name, a in submodel.place(arrays, 1).payload.items()}


# -- on the device ---------------------------------------------------------------------------------------------


def exported(submodel: Submodel, algorithm: Algorithm) -> Exported:
    spec = submodel.spec
    data = DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes)
    bundle = build_bundle(algorithm, spec.units, model=spec.name, data=data)
    return Exported(spec, submodel, algorithm, (), bundle)  # type: ignore[arg-type]


def in_torch(tier: Exported, data: LocalData, seed: int, facts: Mapping[str, Tensor]) -> Tensors:
    """The device's round from the algorithm's functions, with the device's batches and noise."""
    batches = Batches(seed, len(data), tier.bundle.manifest.batch)

    def feed(function: Function, step: int) -> Tensors:
        at = batches.indices(0, step)
        drawn = [name for name in function.inputs if role_of(name) == "noise"]
        uniform = {
            name: torch.from_numpy(noise(seed, step, n, function.inputs[name].shape, "float32"))
            for n, name in enumerate(drawn)
        }
        rows = {"batch.0.x": torch.from_numpy(data.x[at]), "batch.0.y": torch.from_numpy(data.y[at])}
        return rows | uniform | {f"data.{name}": value for name, value in facts.items()}

    return run_round(tier.algorithm, tier.spec.weights, feed).update


def some(spec: ModelSpec, classes: list[int]) -> LocalData:
    rng = np.random.default_rng(5)
    y = rng.choice(classes, 10).astype(np.int64)
    return LocalData(rng.standard_normal((10, *spec.sample.shape)).astype(np.float32), y, "random")


@pytest.mark.parametrize("kind", mostly_slow(["masked", "ordered"], ["masked"]))
def test_a_device_trains_as_torch_does(kind: str, tmp_path: Path) -> None:
    spec = small("mlp")
    whole: Submodel = OutputSide(spec, 0)
    if kind == "ordered":
        whole = width(spec, ratio=1.0, ordered=True, widths=(0.3, 0.6))
    algorithm = algorithms.build(
        "sgd", Objective.of(whole), batch=4, steps=3, lr=0.5, masked_loss=kind == "masked"
    )
    tier, data = exported(whole, algorithm), some(spec, [1, 3])

    result, _ = on_device(tier, data, 11, tmp_path)

    expected = in_torch(tier, data, 11, {"class_counts": torch.from_numpy(np.bincount(data.y, minlength=5))})
    for name, tensor in expected.items():
        np.testing.assert_allclose(result.update[name], tensor.numpy(), rtol=1e-4, atol=1e-5)
    if kind == "masked":
        still = result.update["head.dense.bias"] == spec.weights["head.dense.bias"].numpy()
        assert still.tolist() == [True, False, True, False, True]


def test_a_device_refuses_a_fact_it_does_not_know(tmp_path: Path) -> None:
    spec = build_model("mlp", size=4, hidden=(4,), classes=5)
    algorithm = algorithms.build("sgd", Objective.of(OutputSide(spec, 0)), batch=4, steps=1, masked_loss=True)
    step = algorithm.phases[0].function
    ports = {name.replace("class_counts", "favourites"): port for name, port in step.inputs.items()}

    def fn(tensors: Tensors) -> Tensors:
        return step({name.replace("favourites", "class_counts"): value for name, value in tensors.items()})

    curious = replace(algorithm, phases=(Phase("train", Function("train", fn, ports), 1),))
    with refuses(BundleError, port="data.favourites", known="class_counts"):
        on_device(exported(OutputSide(spec, 0), curious), some(spec, [0, 1]), 1, tmp_path)


def test_a_device_counts_the_classes_of_the_rows_it_uses() -> None:
    spec = DataSpec(shape=(1,), dtype="float32", classes=4)
    x = np.zeros((5, 1), np.float32)
    data = LocalData(x, np.array([2, 0, 2, 3, 3]), "five").fitted(spec)
    assert data.facts()["class_counts"].tolist() == [1, 0, 2, 2]
    assert data.first(3).facts()["class_counts"].tolist() == [1, 0, 2, 0]
    answers = LocalData(x, np.zeros((5, 2), np.float32), "answers").fitted(spec, LabelSpec((2,), "float32"))
    assert answers.facts() == {}


def test_only_a_masked_loss_asks_for_the_classes() -> None:
    objective = Objective.of(OutputSide(small("mlp"), 0))
    asked = {
        masked: select(
            algorithms.build("sgd", objective, masked_loss=masked).phases[0].function.inputs, "data"
        )
        for masked in (False, True)
    }
    assert asked[False] == {} and [port.shape for port in asked[True].values()] == [(5,)]
