"""Exact compaction (fiarse.md 8.3, R3): what a mask has emptied leaves the network, whose logits stay (its invariant 29)."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.resnet import resnet8
from edgefl.submodels.compaction.compact import CompactedNetwork, compact
from edgefl.submodels.importance.strategy import maskable
from edgefl.submodels.importance.submodel import importance
from edgefl.wire.tensors import Arrays
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.rings.rows import mostly_slow
from tests.submodels.nets import model, rows

Masks = dict[str, npt.NDArray[np.bool_]]


class Plain(nn.Module):
    """Convolutions with and without padding, biases and norms; activations that do and do not keep zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 5, 3, padding=1, bias=False), BatchNorm(5)
        self.point, self.bare = nn.Conv2d(5, 6, 1, bias=False), nn.Conv2d(6, 7, 3)
        self.down = nn.Conv2d(7, 6, 3, padding=1, stride=2, groups=1)
        self.hidden, self.head = nn.Linear(6 * 2 * 2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.point(F.relu(self.norm(self.first(x)))))
        x = F.gelu(self.down(F.leaky_relu(self.bare(F.avg_pool2d(x, 2)))))
        return self.head(F.silu(self.hidden(x.flatten(1))))


@cache
def net(name: str) -> ModelSpec:
    if name == "Plain":
        torch.manual_seed(0)
        return ModelSpec("plain", sequential([("all", Plain())]), TensorSpec((2, 12, 12)), 4)
    if name == "resnet8 static":
        return resnet8(size=8, widths=(4, 6, 8), bn="static")
    return model(name)


def trained(spec: ModelSpec, seed: int) -> Arrays:
    """Weights as training leaves them: biases and shifts of either sign, any statistics."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for name, tensor in spec.weights.items():
        array = tensor.numpy().copy()
        if name.endswith("running_var"):
            array = rng.uniform(0.3, 2.0, array.shape).astype(np.float32)
        elif array.ndim == 1:
            array = array + rng.standard_normal(array.shape).astype(np.float32)
        found[name] = array
    return found


def emptied(spec: ModelSpec, seed: int, density: float) -> Masks:
    """Random masks in which whole output channels, whole input channels and whole layers are empty."""
    rng = np.random.default_rng(seed)
    masks: Masks = {}
    for name in maskable(spec):
        shape = tuple(spec.weights[name].shape)
        mask = rng.random(shape) < density
        mask &= (rng.random(shape[0]) < 0.8).reshape(-1, *[1] * (len(shape) - 1))
        if len(shape) > 1:
            mask &= (rng.random(shape[1]) < 0.8).reshape(1, -1, *[1] * (len(shape) - 2))
        masks[name] = mask & (rng.random() < 0.95)
    return masks


def dense(spec: ModelSpec, weights: Arrays, masks: Masks, x: Tensor) -> Tensor:
    """Logits of the whole network with zeros outside the masks."""
    state = {
        name: torch.from_numpy(np.where(masks[name], array, np.float32(0)) if name in masks else array)
        for name, array in weights.items()
    }
    with torch.no_grad():
        return torch.func.functional_call(spec.module.eval(), state, (x,))


def on_runtime(small: CompactedNetwork, x: Tensor) -> Tensor:
    """Logits of the exported inference graph, whose weights are inputs, in ONNX Runtime."""
    module, weights = small.spec.module, small.spec.weights

    def fn(tensors: Tensors) -> Tensors:
        state = {name: tensors[f"weights.{name}"] for name in weights}
        return {"metric.logits": torch.func.functional_call(module, state, (tensors["batch.0.x"],))}

    ports = {f"weights.{name}": TensorSpec.of(tensor) for name, tensor in weights.items()}
    ports["batch.0.x"] = small.spec.sample.rows(len(x))
    session = onnxruntime.InferenceSession(to_onnx(capture(Function("infer", fn, ports))))
    given_ = {f"weights.{name}": array for name, array in small.weights.items()} | {"batch.0.x": x.numpy()}
    [found] = session.run(None, {port.name: given_[port.name] for port in session.get_inputs()})
    return torch.from_numpy(found)


def assert_same(found: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= 1e-5 * scale


def assert_computes(small: CompactedNetwork, spec: ModelSpec, weights: Arrays, masks: Masks) -> None:
    x = rows(spec.sample, 3)
    with torch.no_grad():
        assert_same(small.spec.module(x), dense(spec, weights, masks, x))


@pytest.mark.parametrize("name", mostly_slow(["resnet8", "resnet8 static", "Plain", "mlp"], ["Plain"]))
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20), density=st.sampled_from([0.1, 0.4, 1.0]))
def test_inv29_logits_are_the_same_for_any_mask(name: str, seed: int, density: float) -> None:
    spec = net(name)
    weights, masks = trained(spec, seed), emptied(spec, seed + 1, density)
    small = compact(spec, weights, masks)
    assert_computes(small, spec, weights, masks)
    assert small.report.parameters_after <= small.report.parameters_before + _biases(small)


def _biases(small: CompactedNetwork) -> int:
    """What folding may add."""
    return sum(array.size for name, array in small.weights.items() if name.endswith(("_bias", "_constant")))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "gamma"),
    mostly_slow(
        [
            *(("resnet8", 1 / 16), ("cnn", 1 / 64), ("mlp", 1 / 4), ("vit", 1 / 4)),
            *(("Dense", 1 / 64), ("Gru", 1 / 16), ("MobileNet", 1 / 4)),
        ],
        quick=[("resnet8", 1 / 16), ("mlp", 1 / 4)],
    ),
)
def test_inv29_logits_are_the_same_for_the_largest_entries_of_any_model(name: str, gamma: float) -> None:
    spec = net(name)
    weights = trained(spec, 3)
    masks = dict(importance(spec, gamma=gamma).cut_of(weights).masks)
    small = compact(spec, weights, masks)
    assert_computes(small, spec, weights, masks)
    assert small.report.gamma == pytest.approx(gamma, rel=0.1)


@pytest.mark.parametrize(
    ("name", "seed"), mostly_slow([("resnet8", 5), ("Plain", 8), ("mlp", 1)], [("Plain", 8), ("mlp", 1)])
)
def test_inv29_the_exported_artifact_gives_equal_logits(name: str, seed: int) -> None:
    spec = net(name)
    weights, masks = trained(spec, seed), emptied(spec, seed, 0.3)
    small = compact(spec, weights, masks)
    assert small.report.dead_channels > 0
    x = rows(spec.sample, 3)
    assert_same(on_runtime(small, x), dense(spec, weights, masks, x))


def whole_masks(spec: ModelSpec) -> Masks:
    return {name: np.ones(tuple(spec.weights[name].shape), bool) for name in maskable(spec)}


def test_a_full_mask_takes_nothing_away() -> None:
    spec = net("resnet8")
    report = compact(spec, trained(spec, 0), whole_masks(spec)).report
    assert (report.parameters_before, report.macs_before) == (report.parameters_after, report.macs_after)
    assert report.dead_channels == 0 and report.gamma == 1.0 and report.nonzero == report.parameters_before


def test_a_channel_of_zeros_and_one_that_nobody_reads_leave() -> None:
    spec = net("resnet8")
    weights, masks = trained(spec, 0), whole_masks(spec)
    masks["block1.conv1.weight"][1] = False
    masks["block1.conv2.weight"][:, 2] = False
    mean, var = (weights[f"block1.bn1.running_{what}"] for what in ("mean", "var"))
    at_rest = weights["block1.bn1.bias"] - weights["block1.bn1.weight"] * mean / np.sqrt(var + 1e-5)
    weights["block1.bn1.bias"][1] -= at_rest[1] + 0.5  # the dead channel is -0.5 before the ReLU
    report = compact(spec, weights, masks).report
    assert {name: layer.dead for name, layer in report.layers.items() if layer.dead} == {
        "block1.conv1.weight": 2
    }
    assert report.parameters_before - report.parameters_after == 2 * (4 * 9 + 2 + 4 * 9)
    assert report.macs_after < report.macs_before


def test_a_constant_that_padding_cannot_take_keeps_its_channel() -> None:
    spec = net("resnet8")
    weights, masks = trained(spec, 0), whole_masks(spec)
    masks["block1.conv1.weight"][1] = False
    weights["block1.bn1.bias"][1] += 50.0
    assert compact(spec, weights, masks).report.dead_channels == 0


def test_a_constant_moves_into_the_bias_of_a_reader_without_padding() -> None:
    spec = net("Plain")
    weights, masks = trained(spec, 0), whole_masks(spec)
    masks["all.first.weight"][2] = False
    weights["all.norm.bias"][2] += 50.0
    masks["all.point.weight"][4] = False  # 1/2 behind the sigmoid
    small = compact(spec, weights, masks)
    assert {name: layer.dead for name, layer in small.report.layers.items() if layer.dead} == {
        "all.first.weight": 1,
        "all.point.weight": 1,
    }
    new = {name for name in small.weights if name not in spec.weights}
    assert len([name for name in new if name.endswith("_bias")]) == 2
    assert_computes(small, spec, weights, masks)


def test_a_dead_residual_branch_leaves_whole() -> None:
    spec = net("resnet8")
    weights, masks = trained(spec, 0), whole_masks(spec)
    masks["block2.conv2.weight"][:] = False
    small = compact(spec, weights, masks)
    gone = {name for name, layer in small.report.layers.items() if layer.after == 0}
    assert gone == {"block2.conv1.weight", "block2.conv2.weight"}
    left = {name for name in small.weights if name.startswith("block2.")}
    assert all("shortcut" in name or name.endswith("_constant") for name in left)
    assert_computes(small, spec, weights, masks)


def test_tied_channels_leave_together_or_not_at_all() -> None:
    spec = net("resnet8")
    weights, masks = trained(spec, 0), whole_masks(spec)
    for name in ("block1.conv2.weight", "block1.shortcut.conv.weight"):
        masks[name][3] = False
    for norm in ("block1.bn2", "block1.shortcut.bn"):
        weights[f"{norm}.bias"][3] = -50.0
    both = compact(spec, weights, masks).report
    assert both.layers["block1.conv2.weight"].dead == both.layers["block1.shortcut.conv.weight"].dead == 1
    masks["block1.shortcut.conv.weight"][3] = True
    assert compact(spec, weights, masks).report.dead_channels == 0


def test_an_operation_that_nobody_knows_keeps_what_it_reads() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.sort(self.first(x), dim=1)[0])

    spec = ModelSpec("sorting", sequential([("all", Sorting())]), TensorSpec((6,)), 3)
    weights, masks = trained(spec, 0), whole_masks(spec)
    masks["all.first.weight"][:4] = False
    small = compact(spec, weights, masks)
    assert small.report.dead_channels == 0
    assert_computes(small, spec, weights, masks)


def test_what_does_not_fit_the_model_is_refused() -> None:
    spec = net("mlp")
    weights, masks = trained(spec, 0), whole_masks(spec)
    with pytest.raises(
        ModelError, match=r"the masks of mlp need 'head\.dense\.bias' of shape \(5,\)|head.dense.bias"
    ):
        compact(spec, weights, {"head.dense.bias": np.ones(3, bool)})
    with pytest.raises(ModelError, match=r"the weights of mlp need 'dense1\.dense\.weight'"):
        compact(spec, {name: weights[name] for name in weights if "dense1" not in name}, masks)
