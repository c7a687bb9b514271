"""FIARSE 2.9: which tensors importance may thin out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.importance.learnable import own_weights
from edgefl.submodels.importance.strategy import Strategy, dense, maskable
from edgefl.submodels.importance.submodel import importance

# What is maskable (2.9)


@pytest.mark.parametrize(("classes", "entries"), [(10, 11_164_362), (100, 11_210_532)])
def test_maskable_resnet18_has_the_spec_s_counts(classes: int, entries: int) -> None:
    spec = build_model("resnet18", classes=classes, bn="static")
    weights = own_weights(spec)
    assert sum(weights[name].size for name in maskable(spec)) == entries
    assert sum(weights[name].size for name in dense(spec)) == 9_600, "norm scalars"
    assert set(maskable(spec)) | set(dense(spec)) == set(weights)


@pytest.mark.parametrize(
    ("name", "options", "whole"),
    [
        ("resnet8", {"size": 8}, {"stem.bn.weight", "stem.bn.bias", "stem.bn.running_mean", "stem.bn.running_var"}),
        ("vit", {"size": 8, "width": 12, "depth": 1, "pool": "token"}, {
            "embed.positions.weight", "embed.positions.token", "block1.norm1.weight", "block1.norm1.bias",
            "block1.norm2.weight", "block1.norm2.bias", "head.norm.weight", "head.norm.bias",
        }),
        ("convnext", {"size": 16, "widths": (4, 8), "depths": (1, 1)}, {"stem.norm.weight", "block1.scale.weight"}),
        ("bilstm", {"length": 4, "vocabulary": 9, "features": 3, "hidden": 2}, set()),
        ("lstm_lm", {"length": 4, "vocabulary": 9, "features": 3, "hidden": 2}, set()),
    ],
)  # fmt: skip
def test_maskable_leaves_norms_statistics_and_bare_parameters_dense(name, options, whole) -> None:
    spec = build_model(name, **options)
    kept_whole = set(dense(spec))
    assert whole <= kept_whole if whole else not kept_whole
    last = {"positions", "token", "scale", "norm", "norm1", "norm2", "bn", "bn1", "bn2"}
    assert all(set(path.split(".")) & last for path in kept_whole), kept_whole


def test_maskable_goes_by_the_type_of_layer_and_not_by_its_name() -> None:
    layers = [
        ("norm", nn.Conv1d(2, 4, 3)),
        ("conv", nn.GroupNorm(2, 4)),
        ("up", nn.ConvTranspose1d(4, 4, 3)),
        ("weight", nn.RMSNorm(4)),
        ("flat", nn.Flatten()),
        ("frozen", nn.Linear(16, 3)),
        ("last", nn.Linear(3, 2)),
    ]
    spec = ModelSpec("layers", sequential(layers), TensorSpec((2, 4)), 2)
    spec.module.get_submodule("frozen").requires_grad_(False)
    names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "last.weight", "last.bias")
    assert maskable(spec) == names


def test_maskable_nothing_at_all_is_an_error() -> None:
    spec = ModelSpec("norms", sequential([("only", nn.LayerNorm(3))]), TensorSpec((3,)), 3)
    with pytest.raises(ModelError, match="no layer whose weights"):
        Strategy().groups(spec)


def test_maskable_tensors_and_all_others_are_float32_or_named() -> None:
    layers = [("first", nn.Linear(4, 5)), ("norm", nn.LayerNorm(5)), ("last", nn.Linear(5, 2))]
    for part, dtype in (("last", torch.float64), ("norm", torch.float16), ("first", torch.bfloat16)):
        spec = ModelSpec("mixed", sequential(layers), TensorSpec((4,)), 2)
        spec.module.get_submodule(part).to(dtype)
        for gamma in (0.5, 1.0):
            with pytest.raises(ModelError, match=rf"{part}\.weight.* {dtype}.*\.float\(\)"):
                importance(spec, gamma=gamma)
        spec.module.float()
        assert importance(spec, gamma=0.5).kept == 18
