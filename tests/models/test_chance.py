"""Dropout written as a function, wherever it lies: a noise input of the unit, and no other change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.models.plain import Dropping
from tests.rings.rows import mostly_slow

SAMPLE = TensorSpec((6,))


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Dropping(6, 6), nn.Linear(6, 6), Dropping(6, 6, deep=True), nn.Linear(6, 5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), nn.Sequential(*_layers()[:3]), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.first(x)))


def _noise(spec: ModelSpec) -> list[str]:
    return list(Objective(spec.module, spec.sample).noise(3))


def _dropped(spec: ModelSpec, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return spec.module.train()(x)


def test_a_sequential_keeps_its_children_and_dropout_reads_noise() -> None:
    layers, x = _layers(), torch.randn(3, 6)
    spec = split(layers, sample=SAMPLE, classes=5)

    assert spec.units == ("0", "1", "2", "3")
    assert set(spec.weights) == set(layers.state_dict())
    assert _noise(spec) == ["0.uniform", "2.layer.uniform"]
    assert torch.equal(spec.module.eval()(x), layers.eval()(x))
    assert not torch.equal(_dropped(spec, x, 1), _dropped(spec, x, 2))


@pytest.mark.parametrize(
    ("cuts",),
    mostly_slow(
        [(("first",),), (("inner",),), (("inner.1",),), (("inner.0", "inner.2"),)],
        [(("inner",),), (("inner.0", "inner.2"),)],
    ),
    ids="+".join,
)
def test_named_cuts_keep_what_drops_by_a_function(cuts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 6)
    spec = split(net, cuts, sample=SAMPLE, classes=5)

    assert len(spec.units) == len(cuts) + 1
    assert len(_noise(spec)) == 2
    assert torch.equal(spec.module.eval()(x), net.eval()(x))


@pytest.mark.parametrize("cuts", [pytest.param(None, marks=pytest.mark.slow), ("inner.1",)])
def test_a_step_that_drops_by_a_function_is_exported(cuts: tuple[str, ...] | None) -> None:
    spec = split(_layers() if cuts is None else Net(), cuts, sample=SAMPLE, classes=5)
    step = sgd(Objective(spec.module, spec.sample), batch=4).phases[0].function

    assert sum(name.startswith("noise.") for name in step.inputs) == 2
    assert to_onnx(capture(step))


def test_one_dropout_under_two_names_becomes_two_that_drop_apart() -> None:
    drop = nn.Dropout(0.5)
    spec = split(nn.Sequential(nn.Linear(6, 6), drop, nn.Linear(6, 5), drop), sample=SAMPLE, classes=5)

    assert spec.units == ("0", "1", "2", "3")
    assert [type(part) for part in spec.module] == [nn.Linear, nn.Dropout, nn.Linear, nn.Dropout]
    assert [shape.shape for shape in Objective(spec.module, SAMPLE).noise(3).values()] == [(3, 6), (3, 5)]


class Calm(nn.Module):
    """Functions that draw in training alone, told that they do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.rrelu(self.first(x), training=False)
        x = F.alpha_dropout(F.dropout(x, 0.5, training=False), 0.5, training=False)
        x = F.rrelu(F.feature_alpha_dropout(self.second(x), 0.5, training=False))
        return self.head(F.dropout1d(x.unsqueeze(1), 0.5, training=False).squeeze(1))


def test_functions_that_are_told_not_to_train_draw_nothing() -> None:
    torch.manual_seed(0)
    net, x = Calm(), torch.randn(3, 6)
    spec = split(net, sample=SAMPLE, classes=5)

    assert spec.units == ("first", "second", "head")
    assert _noise(spec) == []
    assert torch.equal(_dropped(spec, x, 1), net.train()(x))
    step = sgd(Objective(spec.module, spec.sample), batch=4).phases[0].function
    assert not [name for name in capture(step).inputs if name.startswith("noise.")]
    to_onnx(capture(step))
