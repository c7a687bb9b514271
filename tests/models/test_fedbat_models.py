"""The models of the FedBAT paper to the digit (fedbat.md 2.9, 4.1), and group norm in place of batch norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from edgefl import algorithms
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.catalog import build as cut
from edgefl.submodels.width.submodel import Width
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.support.errors import ModelError, refuses

# Model and options; parameters, tensors, bytes of one bit per parameter, bytes of the moving statistics.
PAPER = {
    "CNN FMNIST": ("fedbat_cnn", {}, (390_890, 14, 48_918, 3_840)),
    "CNN SVHN": ("fedbat_cnn", {"in_channels": 3, "size": 32}, (399_146, 14, 49_950, 3_840)),
    "ResNet-10, 10 classes": ("resnet10", {}, (1_228_970, 38, 153_774, 11_520)),
    "ResNet-10, 100 classes": ("resnet10", {"classes": 100}, (1_252_100, 38, 156_665, 11_520)),
}
SMALL = {
    "fedbat_cnn": {"size": 16, "widths": (8, 16, 16, 24), "classes": 5},
    "resnet10": {"size": 12, "widths": (8, 16, 16, 24), "classes": 5},
    "resnet8": {"size": 12, "widths": (8, 16, 24), "classes": 5},
    "resnet18": {"size": 8, "widths": (8, 16, 16, 24), "classes": 5},
    "resnet20": {"size": 8, "widths": (8, 16, 24), "classes": 5},
}


@pytest.mark.parametrize("row", PAPER)
def test_sizes_are_those_of_the_paper(row: str) -> None:
    name, options, expected = PAPER[row]
    spec = build_model(name, **options)
    trained = [tensor.numel() for tensor in spec.module.parameters()]
    packed = sum(-(-size // 8) + 4 for size in trained)
    moving = sum(buffer.nbytes for buffer in spec.module.buffers())
    assert (sum(trained), len(trained), packed, moving) == expected


def test_the_cnn_s_stages_have_the_paper_s_shapes() -> None:
    spec = build_model("fedbat_cnn", in_channels=3, size=32)
    assert spec.units == ("conv1", "conv2", "conv3", "conv4", "head")
    assert [spec.boundary(cut).shape for cut in range(6)] == [
        (3, 32, 32), (32, 16, 16), (64, 8, 8), (128, 4, 4), (256, 2, 2), (10,)
    ]  # fmt: skip
    assert build_model("fedbat_cnn").boundary(4).shape == (256, 1, 1)


def test_the_resnet_s_blocks_have_the_paper_s_shapes_and_projections() -> None:
    spec = build_model("resnet10")
    assert spec.units == ("stem", "block1", "block2", "block3", "block4", "head")
    assert [spec.boundary(cut).shape for cut in range(1, 6)] == [
        (32, 32, 32), (32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)
    ]  # fmt: skip
    projections = {key for key in spec.weights if "shortcut.conv" in key}
    assert projections == {f"block{number}.shortcut.conv.weight" for number in (2, 3, 4)}


def test_the_cnn_pools_what_relu_and_norm_leave_of_a_convolution() -> None:
    spec = build_model("fedbat_cnn", **SMALL["fedbat_cnn"], seed=3)
    x, weights = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)), spec.weights
    found = x
    for number in range(1, 5):
        found = nn.functional.conv2d(found, weights[f"conv{number}.conv.weight"], padding=1)
        mean, var = found.mean((0, 2, 3), keepdim=True), found.var((0, 2, 3), correction=0, keepdim=True)
        found = nn.functional.max_pool2d(((found - mean) / (var + 1e-5).sqrt()).clamp_min(0), 2)
    found = found.flatten(1) @ weights["head.dense.weight"].T
    torch.testing.assert_close(spec.module.train()(x), found, rtol=1e-4, atol=1e-5)


def test_images_too_small_for_four_pools_are_refused_with_the_least_size() -> None:
    with refuses(ModelError, size=15):
        build_model("fedbat_cnn", size=15)
    assert build_model("fedbat_cnn", size=8, widths=(8, 8, 8)).boundary(3).shape == (8, 1, 1)


@pytest.mark.parametrize("name", SMALL)
def test_group_norm_has_the_same_trained_tensors_and_no_statistics(name: str) -> None:
    batch, group, pairs = (
        build_model(name, **SMALL[name], **options)
        for options in ({"norm": "bn"}, {"norm": "gn"}, {"norm": "gn", "groups": 2})
    )
    shapes = [{key: value.shape for key, value in spec.module.named_parameters()} for spec in (batch, group)]
    assert shapes[0] == shapes[1]
    assert list(batch.module.buffers()) and not list(group.module.buffers())
    assert not any(isinstance(part, BatchNorm) for part in group.module.modules())
    assert {norm.num_groups for norm in _group_norms(group)} == {8}
    assert {norm.num_groups for norm in _group_norms(pairs)} == {2}
    assert all(bool((norm.weight == 1).all() and (norm.bias == 0).all()) for norm in _group_norms(group))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "kind", "algorithm"),
    [
        ("fedbat_cnn", {"norm": "gn"}, "output_side", "sgd"),
        ("fedbat_cnn", {"norm": "bn"}, "output_side", "sgd"),
        ("resnet10", {"norm": "gn"}, "output_side", "sgd"),
        ("fedbat_cnn", {"norm": "gn", "groups": 4}, "width", "sgd"),
        ("fedbat_cnn", {"norm": "gn", "groups": 4}, "importance", "tcbgd"),
    ],
)
def test_the_exported_step_of_either_norm_equals_torch(
    name: str, options: dict[str, Any], kind: str, algorithm: str
) -> None:
    spec = build_model(name, **SMALL[name], **options)
    part = cut(spec, kind, **({"cut": 0} if kind == "output_side" else {"gamma": 0.3}))
    step = algorithms.build(algorithm, Objective.of(part), batch=8).phases[0].function
    assert verify(step, to_onnx(capture(step)), seed=7).worst <= 1e-4


def test_a_narrow_model_with_group_norm_keeps_as_much_of_each_group() -> None:
    spec = build_model("fedbat_cnn", **SMALL["fedbat_cnn"], norm="gn", groups=4)
    kept = Width(spec, 0.5, "floor").regions(0)["conv2.norm.weight"].axes[0]
    assert kept == (0, 1, 4, 5, 8, 9, 12, 13)


def test_a_norm_that_cannot_be_is_named_with_the_remedy() -> None:
    with refuses(ModelError, norm="layer"):
        build_model("resnet10", norm="layer")
    with refuses(ModelError, bn="static"):
        build_model("fedbat_cnn", norm="gn", bn="static")
    with refuses(ModelError, groups=7, channels=32):
        build_model("fedbat_cnn", norm="gn", groups=7)
    with refuses(ModelError, groups=0, channels=32):
        build_model("resnet10", norm="gn", groups=0)


def test_batch_norm_has_its_modes_in_the_new_models_too() -> None:
    for name in ("fedbat_cnn", "resnet10"):
        assert not list(build_model(name, **SMALL[name], bn="static").module.buffers())


def _group_norms(spec: ModelSpec) -> Iterator[nn.GroupNorm]:
    found = [part for part in spec.module.modules() if isinstance(part, nn.GroupNorm)]
    assert found
    yield from found
