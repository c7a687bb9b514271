"""SWAT training: the gradients of a sparse layer written out, what is kept, and the same in every engine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.quantized.swat import TopSelection, make_sparse
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, select
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


def _algorithm(spec: ModelSpec, **options: object) -> Algorithm:
    return algorithms.build("swat", Objective(spec.module, spec.sample, spec.loss), batch=4, **options)


def _top(tensor: Tensor, count: int) -> Tensor:
    """``count`` entries of largest magnitude, by a stable sort; zeros elsewhere."""
    order = tensor.abs().flatten().argsort(descending=True, stable=True)[:count]
    kept = torch.zeros(tensor.numel(), dtype=torch.bool)
    kept[order] = True
    return torch.where(kept.reshape(tensor.shape), tensor, torch.zeros(()))


# -- the gradient ----------------------------------------------------------------------------------------------


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1))


def _patches(x: Tensor) -> Tensor:
    """Each output pixel's 3x3 patch of a padded input: (B, C * 9, H * W)."""
    return F.unfold(_padded(x), 3)


def _by_hand(weights: Tensors, x: Tensor, y: Tensor, share: float, *, activations: bool) -> Tensors:
    """Conv 3x3 -> ReLU -> flatten -> dense, back through matrix products alone, by the rules of SWAT."""

    def top(tensor: Tensor) -> Tensor:
        return _top(tensor, math.ceil(share * tensor.numel()))

    w1, b1, w2, b2 = (weights[name] for name in ("0.weight", "0.bias", "3.weight", "3.bias"))
    s1, s2 = top(w1), top(w2)
    pre = s1.reshape(len(w1), -1) @ _patches(x) + b1[:, None]
    hidden = pre.clamp_min(0).flatten(1)
    logits = hidden @ s2.T + b2
    d_logits = (logits.softmax(1) - F.one_hot(y, logits.shape[1])) / len(y)
    d_pre = (d_logits @ s2).reshape(pre.shape) * (pre > 0)
    # The layers read these in the backward pass only.
    seen, read = (top(x), top(hidden)) if activations else (x, hidden)
    return {
        "0.weight": torch.einsum("bop,bkp->ok", d_pre, _patches(seen)).reshape(w1.shape),
        "0.bias": d_pre.sum((0, 2)),
        "3.weight": d_logits.T @ read,
        "3.bias": d_logits.sum(0),
    }


def _small() -> ModelSpec:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 4))
    return split(net, sample=TensorSpec((2, 5, 5)), classes=4)


@pytest.mark.parametrize("activations", [True, False])
def test_gradients_are_those_of_swat_written_out(activations: bool) -> None:
    spec = _small()
    x, y = samples(spec, 7)
    objective = make_sparse(Objective(spec.module, spec.sample, spec.loss), TopSelection(0.1, activations))
    found = gradient(objective, spec.weights, {"batch.0.x": x, "batch.0.y": y})[2]
    expected = _by_hand(spec.weights, x, y, 0.1, activations=activations)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_sparse_activations_change_weight_gradients_and_nothing_else() -> None:
    spec = _small()
    x, y = samples(spec, 7)
    full, thin = (
        gradient(
            make_sparse(Objective(spec.module, spec.sample, spec.loss), TopSelection(0.1, activations)),
            spec.weights,
            {"batch.0.x": x, "batch.0.y": y},
        )
        for activations in (False, True)
    )
    assert torch.equal(full[0], thin[0])
    for name in spec.weights:
        same = torch.allclose(full[2][name], thin[2][name], rtol=1e-5, atol=1e-8)
        assert same == name.endswith("bias"), name


@pytest.mark.parametrize("padding", ["same", "reflect"])
def test_any_padding_of_a_convolution_keeps_its_gradients(padding: str) -> None:
    how = {"padding": "same"} if padding == "same" else {"padding": 1, "padding_mode": padding}
    spec = split(
        nn.Sequential(nn.Conv2d(2, 3, 3, **how), nn.Flatten(), nn.Linear(75, 4)),
        sample=TensorSpec((2, 5, 5)),
        classes=4,
    )
    x, y = samples(spec, 3)
    plain = Objective(spec.module, spec.sample, spec.loss)
    data = {"batch.0.x": x, "batch.0.y": y}
    expected = gradient(plain, spec.weights, data)[2]
    for name, value in gradient(make_sparse(plain, TopSelection(1.0)), spec.weights, data)[2].items():
        torch.testing.assert_close(value, expected[name], msg=name)


# -- what is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "share", "kept"), [(100, 1 - 0.97, 3), (101, 0.03, 4), (7, 1e-12, 1), (5, 1.0, 5)]
)
def test_the_top_has_the_ceiling_of_its_share_and_at_least_one(entries: int, share: float, kept: int) -> None:
    tensor = torch.randn(entries, generator=torch.Generator().manual_seed(entries))
    top = TopSelection(share).of(tensor)
    assert int(top.ne(0).sum()) == kept
    assert torch.equal(top, _top(tensor, kept))


def test_ties_of_the_last_kept_entry_are_kept() -> None:
    assert TopSelection(0.25).of(torch.tensor([1.0, -2.0, 2.0, 0.5])).tolist() == [0.0, -2.0, 2.0, 0.0]


def test_without_sparsity_a_round_is_that_of_sgd() -> None:
    spec = tiny("resnet8")
    x, y = samples(spec, 12)
    objective = Objective(spec.module, spec.sample, spec.loss)
    plain = algorithms.build("sgd", objective, batch=4, steps=3, momentum=0.5, weight_decay=0.01)
    sparse = _algorithm(spec, steps=3, momentum=0.5, weight_decay=0.01, sparsity=0.0)
    expected = run_round(plain, spec.weights, walk(x, y, 4)).update
    for name, value in run_round(sparse, spec.weights, walk(x, y, 4)).update.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_norms_biases_and_layers_without_trained_weights_stay_dense() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3))
    net[2].requires_grad_(False)
    spec = split(net, sample=TensorSpec((6,)), classes=3)
    made = make_sparse(Objective(spec.module, spec.sample, spec.loss), TopSelection(0.1))
    names = [type(layer).__name__ for layer in made.suffix]
    assert names == ["SparseLinear", "LayerNorm", "Linear", "SparseLinear"]


# -- training --------------------------------------------------------------------------------------------------


def _trained(spec: ModelSpec, algorithm: Algorithm, x: Tensor, y: Tensor) -> tuple[list[float], Tensors]:
    step, losses = algorithm.phases[0].function, []
    state = algorithm.start({f"weights.{name}": value for name, value in spec.weights.items()})
    for _ in range(algorithm.phases[0].steps):
        out = step({**state, "batch.0.x": x, "batch.0.y": y, "hyper.lr": torch.tensor(algorithm.hyper["lr"])})
        losses.append(float(out.pop("metric.loss")))
        state = {name: value for name, value in out.items() if name.startswith("state.")}
    return losses, select(state, "state.weights")


def test_steps_reduce_the_loss_and_move_weights_outside_the_top() -> None:
    spec = _small()
    x, y = samples(spec, 16)
    before = {name: value.clone() for name, value in spec.weights.items()}
    algorithm = algorithms.build(
        "swat", Objective(spec.module, spec.sample, spec.loss), batch=16, steps=40, sparsity=0.8, lr=0.2
    )
    losses, after = _trained(spec, algorithm, x, y)
    assert losses[-1] < 0.5 * losses[0]
    outside = TopSelection(0.2).of(before["3.weight"]) == 0
    assert (after["3.weight"] - before["3.weight"])[outside].abs().max() > 0


def test_inference_reads_the_top_unless_it_is_asked_for_all_weights() -> None:
    spec = tiny("cnn")
    x, y = samples(spec, 4)
    inputs = {f"weights.{name}": value for name, value in spec.weights.items()}
    data = {"batch.0.x": x, "batch.0.y": y, "batch.0.mask": torch.ones(4)}
    kernels = Objective(spec.module, spec.sample).kernels
    top = {
        f"weights.{name}": _top(value, math.ceil(0.1 * value.numel() - 1e-9)) if name in kernels else value
        for name, value in spec.weights.items()
    }
    plain = algorithms.build("sgd", Objective(spec.module, spec.sample, spec.loss), batch=4)
    for options, read in (({}, top), ({"dense_inference": True}, inputs)):
        found = _algorithm(spec, sparsity=0.9, **options).evaluate(inputs | data)
        torch.testing.assert_close(found, plain.evaluate(read | data))


# -- engines, submodels, errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "activations"),
    mostly_slow([("small", True), ("mlp", False), ("bilstm", True)], quick=[("mlp", False)]),
)
def test_every_function_is_the_same_in_onnxruntime(model: str, activations: bool) -> None:
    spec = _small() if model == "small" else tiny(model)
    for function in _algorithm(spec, sparsity=0.9, activations=activations, momentum=0.5).functions:
        assert verify(function, to_onnx(capture(function)), 0).worst <= 1e-4, function.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            ("output_side", {"cut": 1}),
            ("width", {"ratio": 0.5, "ordered": True}),
            ("importance", {"gamma": 0.5}),
        ],
        quick=[("output_side", {"cut": 1})],
    ),
)
def test_a_step_of_any_kind_of_submodel_equals_onnxruntime(kind: str, options: dict[str, object]) -> None:
    submodel = submodels.build(tiny("cnn"), kind, **options)
    step = algorithms.build("swat", Objective.of(submodel), batch=4, sparsity=0.9).phases[0].function
    assert verify(step, to_onnx(capture(step)), 0).worst <= 1e-4


def _nodes(function: Function, op: str) -> int:
    return sum(op in str(node.target) for node in capture(function).module.graph.nodes)


@pytest.mark.slow
def test_a_sparse_step_has_the_convolutions_and_products_of_a_dense_one() -> None:
    spec = _small()
    dense = (
        algorithms.build("sgd", Objective(spec.module, spec.sample, spec.loss), batch=4).phases[0].function
    )
    sparse = _algorithm(spec).phases[0].function
    for op in ("aten.convolution", "aten.mm", "aten.addmm"):
        assert _nodes(sparse, op) == _nodes(dense, op), op


def test_a_wrong_sparsity_and_a_model_without_a_known_layer_are_refused() -> None:
    with refuses(ModelError, sparsity=1.0):
        _algorithm(tiny("mlp"), sparsity=1.0)
    embedding = split(
        nn.Sequential(nn.Embedding(9, 3), nn.Flatten()), sample=TensorSpec((2,), torch.int64, 9), classes=6
    )
    with refuses(ModelError, layers=["Embedding"]):
        _algorithm(embedding)
