"""Splitting: any module at named cuts computes what it computed before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.programs.contract import TensorSpec
from edgefl.programs.objective import Objective
from edgefl.programs.sgd import sgd
from edgefl.wire.errors import ModelError

SAMPLE = TensorSpec((1, 9, 9))
CUTS = ((), ("layer1",), ("layer1.0", "layer2"), ("stem", "layer1.0", "layer1.1", "layer2"))


class Residual(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(inside, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)) + self.skip(x))


class Net(nn.Module):
    """Control flow inside a block, a parameter and a function of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 6))
        self.layer2 = Residual(6, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)
        self.gain = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain
        x = self.layer1(torch.relu(self.stem(x)))
        return self.head(self.drop(self.layer2(x).mean((2, 3)) * gain))


class TwoCross(Net):
    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.stem(x))
        late = self.layer1[0](early)
        return self.head(self.layer2(self.layer1[1](late + early)).mean((2, 3)))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(81, 81), nn.Linear(81, 81), nn.Linear(81, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(self.second(self.first(x.flatten(1)))))


def _net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    net = kind()
    net(torch.randn(8, 1, 9, 9))  # moves the statistics away from 0 and 1
    return net


def _split(net: nn.Module, *cuts: str) -> ModelSpec:
    return split(net, cuts, sample=SAMPLE, classes=10)


@pytest.mark.parametrize("cuts", CUTS, ids="+".join)
def test_cuts_at_any_depth_compute_the_same(cuts: tuple[str, ...]) -> None:
    net = _net().eval()
    spec = _split(net, *cuts)
    x = torch.randn(3, 1, 9, 9)
    assert len(spec.units) == len(cuts) + 1
    assert torch.equal(spec.module.eval()(x), net(x))


def test_training_mode_computes_the_same_and_moves_the_same_statistics() -> None:
    net = _net()
    net.drop.p = 0.0
    spec = _split(net, "layer1", "layer2")
    x = torch.randn(4, 1, 9, 9)
    torch.testing.assert_close(spec.module.train()(x), net.train()(x))
    torch.testing.assert_close(
        spec.weights["layer2.bn.running_var"], net.state_dict()["layer2.bn.running_var"]
    )


def test_names_stay_readable_and_complete() -> None:
    net = _net()
    spec = _split(net, "layer1", "layer2")
    assert spec.units == ("layer1", "layer2", "tail")
    assert {"layer1.stem.weight", "layer1.layer1.0.conv.weight", "layer2.conv.weight", "tail.gain"} <= set(
        spec.weights
    )
    tracked = [name for name in net.state_dict() if "num_batches" not in name]
    assert len(spec.weights) == len(tracked)


def test_cuts_are_taken_in_the_order_of_execution() -> None:
    assert _split(_net(), "layer2", "stem").units == ("stem", "layer2", "tail")


def test_a_cut_where_two_tensors_cross_names_the_cut_and_the_tensors() -> None:
    with pytest.raises(ModelError, match=r"cut 'layer1\.0'.*found 2: relu, layer1\.0") as caught:
        _split(_net(TwoCross), "layer1.0")
    assert caught.value.details["tensors"] == ["relu", "layer1.0"]
    with pytest.raises(ModelError, match=r"cut 'layer2\.conv'"):
        _split(_net(), "layer2.conv")


def test_wrong_cuts_and_shared_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="no submodule 'layer9'"):
        _split(_net(), "layer9")
    with pytest.raises(ModelError, match="never called"):
        _split(_net(TwoCross), "drop")
    with pytest.raises(ModelError, match="twice"):
        _split(_net(), "stem", "stem")
    with pytest.raises(ModelError, match="same place"):
        _split(_net(), "layer1", "layer1.1")
    with pytest.raises(ModelError, match=r"first.* is used before and after"):
        _split(Shared(), "second", "head")
    with pytest.raises(ModelError, match="12 classes"):
        split(_net(), ["layer2"], sample=SAMPLE, classes=12)


def test_a_sequential_keeps_its_children_and_the_original_is_not_touched() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(81, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)).eval()
    before = list(net.state_dict())
    spec = split(net, sample=SAMPLE, classes=10)
    x = torch.randn(3, 1, 9, 9)
    assert torch.equal(spec.module(x), net(x))
    assert spec.units == ("0", "1", "2", "3", "4")
    assert list(net.state_dict()) == before
    assert isinstance(net[2], nn.BatchNorm1d)


def test_a_split_model_trains() -> None:
    spec = _split(_net(), "layer1", "layer2")
    objective = Objective(spec.part(1, 3), spec.boundary(1))
    step = sgd(objective, batch=4).phases[0].function
    assert "noise.tail.drop.uniform" in step.inputs
    out = step(step.example(0))
    assert all(torch.isfinite(tensor).all() for tensor in out.values())
