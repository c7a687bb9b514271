"""BiFL's training of binary weights: what the layers read, where the gradient goes, and the same in every engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.quantized.binary import binarize
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as submodels
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.rings.rows import mostly_slow
from tests.support.errors import ModelError, refuses
from tests.support.reference import run_round


def _objective(spec: ModelSpec) -> Objective:
    return Objective(spec.module, spec.sample, spec.loss)


def _algorithm(spec: ModelSpec, **options: object) -> Algorithm:
    return algorithms.build("binary", _objective(spec), batch=4, **options)


def _binary(weight: Tensor) -> Tensor:
    """mean|W| sign(W), with sign(0) = +1."""
    return weight.abs().mean() * torch.where(weight < 0, -1.0, 1.0)


def _as_read(spec: ModelSpec, weights: Tensors) -> Tensors:
    """The cnn's and the mlp's tensors of two and more dimensions are all kernels."""
    return {name: _binary(value) if value.dim() > 1 else value for name, value in weights.items()}


def _written_out(spec: ModelSpec, weights: Tensors, x: Tensor, y: Tensor, *, clip: bool) -> Tensors:
    """Gradients by plain autograd at the binary weights, taken for those of the weights."""
    read = {name: value.requires_grad_() for name, value in _as_read(spec, weights).items()}
    F.cross_entropy(torch.func.functional_call(spec.module.train(), read, (x,)), y).backward()
    return {
        name: torch.where(weights[name].abs() > 1, 0.0, value.grad)
        if clip and value.dim() > 1
        else value.grad
        for name, value in read.items()
    }


@pytest.mark.parametrize("clip", [False, True])
def test_the_gradient_at_the_binary_weights_passes_straight_through(clip: bool) -> None:
    spec = tiny("cnn")
    weights = {name: value.clone() * 20 for name, value in spec.weights.items()}  # some beyond 1
    x, y = samples(spec, 5)
    found = gradient(binarize(_objective(spec), clip=clip), weights, {"batch.0.x": x, "batch.0.y": y})[2]
    expected = _written_out(spec, weights, x, y, clip=clip)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-6 * float(value.abs().max()), msg=name
        )
    large = weights["conv2.conv.weight"].abs() > 1
    assert large.any() and (found["conv2.conv.weight"][large] == 0).all() == clip


def test_kernels_are_read_with_two_values_and_zero_counts_as_positive() -> None:
    spec = tiny("cnn")
    weights = {name: value.clone() for name, value in spec.weights.items()}
    weights["dense2.dense.weight"][0, :3] = torch.tensor([0.0, -0.0, -1e-30])
    read = binarize(_objective(spec)).carrier.effective(weights, {}, {}, training=True)
    for name, value in _as_read(spec, weights).items():
        assert torch.equal(read[name], value), name
        assert value.dim() == 1 or len(read[name].unique()) == 2, name
    size = weights["dense2.dense.weight"].abs().mean()
    assert read["dense2.dense.weight"][0, :3].tolist() == [size, size, -size]


def test_embeddings_norms_and_statistics_are_read_as_they_are() -> None:
    for model, plain in (("bilstm", "embedding.weight"), ("resnet8", "bn1.weight")):
        spec = tiny(model)
        read = binarize(_objective(spec)).carrier.effective(spec.weights, {}, {}, training=True)
        same = {name for name, value in spec.weights.items() if torch.equal(read[name], value)}
        assert any(name.endswith(plain) for name in same), model
        assert same == spec.weights.keys() - _objective(spec).kernels


def test_the_update_has_the_weights_themselves_and_steps_reduce_the_loss() -> None:
    spec = tiny("mlp")
    x, y = samples(spec, 4)
    algorithm = _algorithm(spec, steps=30, lr=0.1)
    update = run_round(algorithm, spec.weights, walk(x, y, 4)).update
    assert update.keys() == spec.weights.keys()
    assert len(update["head.dense.weight"].unique()) > 2
    objective = binarize(_objective(spec))
    before, after = (
        float(objective.evaluate(w, x, y, torch.ones(len(y)))["loss_sum"]) for w in (spec.weights, update)
    )
    assert after < 0.5 * before


def test_evaluation_reads_binary_weights() -> None:
    spec = tiny("cnn")
    x, y = samples(spec, 4)
    data = {"batch.0.x": x, "batch.0.y": y, "batch.0.mask": torch.ones(4)}
    plain = algorithms.build("sgd", _objective(spec), batch=4)
    found = _algorithm(spec).evaluate({f"weights.{n}": value for n, value in spec.weights.items()} | data)
    read = {f"weights.{n}": value for n, value in _as_read(spec, spec.weights).items()}
    torch.testing.assert_close(found, plain.evaluate(read | data))
    dense = plain.evaluate({f"weights.{n}": value for n, value in spec.weights.items()} | data)
    assert (found["metric.loss_sum"] - dense["metric.loss_sum"]).abs() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            ("output_side", {"cut": 1}),
            ("width", {"ratio": 0.5, "scaler": True}),
            ("width", {"ratio": 0.5, "ordered": True}),
        ],
        quick=[("output_side", {"cut": 1})],
    ),
)
def test_a_step_of_any_positional_kind_equals_onnxruntime(kind: str, options: dict[str, object]) -> None:
    submodel = submodels.build(tiny("cnn"), kind, **options)
    step = algorithms.build("binary", Objective.of(submodel), batch=4).phases[0].function
    assert verify(step, to_onnx(capture(step)), 0).worst <= 1e-4


def test_channels_that_a_step_leaves_out_are_zero() -> None:
    submodel = submodels.build(tiny("resnet8"), "width", ratio=1.0, ordered=True, widths=(0.5, 1.0))
    objective = binarize(Objective.of(submodel))
    before = {name: value + 1.0 for name, value in submodel.spec.weights.items()}
    noise = {"width": torch.tensor(0.1)}
    read = objective.carrier.effective(before, {}, noise, training=True)
    halves = [(name, value, len(value) // 2) for name, value in before.items() if not name.startswith("head")]
    for name, _, half in halves:
        if name in objective.kernels:
            assert (read[name][half:] == 0).all() and (read[name][:half] != 0).any(), name
    moved = objective.carrier.keep_idle({name: value + 1 for name, value, _ in halves}, before, noise)
    for name, value, half in halves:
        assert torch.equal(moved[name][half:], value[half:]), name
        assert (moved[name][:half] != value[:half]).any(), name


@pytest.mark.parametrize("kind", ["importance", "importance_structured"])
def test_submodels_that_are_chosen_by_magnitude_are_refused(kind: str) -> None:
    submodel = submodels.build(tiny("cnn"), kind, gamma=0.5)
    with refuses(ModelError, carrier=...):
        algorithms.build("binary", Objective.of(submodel))


def test_a_model_without_a_kernel_is_refused() -> None:
    spec = split(nn.Sequential(nn.Flatten(), nn.LayerNorm(6)), sample=TensorSpec((6,)), classes=6)
    with refuses(ModelError, tensors=("1.weight", "1.bias")):
        _algorithm(spec)
