"""Splitting: any module at named cuts computes what it computed before."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl import algorithms
from edgefl.contract.tensors import TensorSpec
from edgefl.models import user_code
from edgefl.models.losses import BinaryCrossEntropy, SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, EdgeflError, ModelError, refuses

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
        self.layer1 = nn.Sequential(Residual(4, 4), nn.Conv2d(4, 6, 1))
        self.layer2 = Residual(6, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)
        self.gain = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain
        x = self.layer1(torch.relu(self.stem(x)))
        return self.head(self.drop(self.layer2(x).mean((2, 3)) * gain))


class TwoCross(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.idle = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 6, 3))
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.stem(x))
        late = self.layer1[0](early)
        return self.head(self.layer1[1](late + early).mean((2, 3)))


def _net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(8, 1, 9, 9))  # moves the statistics away from 0 and 1
    return net


def _split(net: nn.Module, *cuts: str) -> ModelSpec:
    return split(net, cuts, sample=SAMPLE, classes=10)


@pytest.mark.parametrize(("cuts",), mostly_slow(((cuts,) for cuts in CUTS), [(CUTS[2],)]), ids="+".join)
def test_cuts_at_any_depth_compute_the_same(cuts: tuple[str, ...]) -> None:
    net = _net().eval()
    spec = _split(net, *cuts)
    x = torch.randn(3, 1, 9, 9)
    assert len(spec.units) == len(cuts) + 1
    assert torch.equal(spec.module.eval()(x), net(x))


@cache
def _in_three() -> tuple[Net, ModelSpec]:
    """Without dropout, so that both draw alike."""
    net = _net()
    net.drop.p = 0.0
    return net, _split(net, "layer1", "layer2")


def test_training_mode_computes_the_same_and_moves_the_same_statistics() -> None:
    net, spec = _in_three()
    x = torch.randn(4, 1, 9, 9)
    torch.testing.assert_close(spec.module.train()(x), net.train()(x))
    torch.testing.assert_close(
        spec.weights["layer2.bn.running_var"], net.state_dict()["layer2.bn.running_var"]
    )


def test_names_stay_readable_and_complete() -> None:
    net, spec = _in_three()
    assert spec.units == ("layer1", "layer2", "tail")
    assert {"layer1.stem.weight", "layer1.layer1.0.conv.weight", "layer2.conv.weight", "tail.gain"} <= set(
        spec.weights
    )
    tracked = [name for name in net.state_dict() if "num_batches" not in name]
    assert len(spec.weights) == len(tracked)


def test_cuts_are_taken_in_the_order_of_execution() -> None:
    assert _split(Clashing(), "a_0", "append").units == ("append_", "a_0", "tail")


def test_a_cut_where_two_tensors_cross_names_the_cut_and_the_tensors() -> None:
    with refuses(ModelError, cut="layer1.0", tensors=["relu", "layer1.0"]):
        _split(TwoCross(), "layer1.0")


@pytest.mark.slow
def test_a_cut_inside_a_residual_block_is_named() -> None:
    with pytest.raises(ModelError, match=r"cut 'layer2\.conv'"):
        _split(_net(), "layer2.conv")


def test_wrong_cuts_are_refused() -> None:
    with refuses(
        ModelError, cuts=("layer9",), known=["head", "idle", "layer1", "layer1.0", "layer1.1", "stem"]
    ):
        _split(TwoCross(), "layer9")
    with refuses(ModelError, cut="idle"):
        _split(TwoCross(), "idle")
    with pytest.raises(ModelError, match="twice"):
        _split(TwoCross(), "stem", "stem")
    with refuses(ModelError, cuts=("a", "a.0")):
        _split(Clashing(), "a", "a.0")
    with refuses(ModelError, found=(10,), classes=12):
        split(TwoCross(), ["head"], sample=SAMPLE, classes=12)


def test_a_sequential_keeps_its_children_and_the_original_is_not_touched() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(81, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)).eval()
    before = list(net.state_dict())
    spec = split(net, sample=SAMPLE, classes=10)
    x = torch.randn(3, 1, 9, 9)
    assert torch.equal(spec.module(x), net(x))
    assert spec.units == ("0", "1", "2", "3", "4")
    assert list(net.state_dict()) == before
    assert isinstance(net[2], nn.BatchNorm1d)


class Clashing(nn.Module):
    """Submodules whose unit names would collide, or be attributes of an ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.append, self.a = nn.Linear(81, 8), nn.Sequential(nn.Linear(8, 8))
        self.a_0, self.tail, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tail(self.a_0(self.a(self.append(x.flatten(1))))))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("cuts", "units"),
    [
        (("append", "a.0", "a_0"), ("append_", "a_0", "a_0_", "tail")),
        (("a.0", "tail"), ("a_0", "tail", "tail_")),
        (("a_0", "head"), ("a_0", "head")),
        (("head",), ("head",)),
    ],
)
def test_every_unit_has_a_name_of_its_own(cuts: tuple[str, ...], units: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    net, x = Clashing(), torch.randn(3, 1, 9, 9)
    spec = _split(net, *cuts)
    assert spec.units == units
    assert torch.equal(spec.module(x), net(x))


def test_outputs_are_classes_only_where_the_loss_chooses_among_them() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(81, 5))
    for loss in (BinaryCrossEntropy(), SquaredError()):
        assert split(net, sample=SAMPLE, classes=5, loss=loss).label.shape == (5,)
    with refuses(ModelError, found=(5,), classes=4):
        split(net, sample=SAMPLE, classes=4)


# -- options of kinds and algorithms -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("importance", {"min_keep": "8"}),
        ("importance", {"strategy": "tensor"}),
        ("importance", {"shards": [["stem", 3]]}),
        ("width", {"ratio": "x"}),
        ("width", {"gamma": 0.25, "rolling": "no"}),
        ("width", {"gamma": 0.25, "ordered": True, "widths": "ab"}),
        ("output_side", {"cut": 1.5}),
    ],
)
def test_an_option_of_a_kind_of_another_type_is_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"option '\w+' of submodel kind"):
        catalog.build(build_model("mlp"), kind, **options)


@pytest.mark.parametrize("options", [{"steps": "ten"}, {"lr": "x"}, {"remask": 1}])
def test_an_option_of_an_algorithm_of_another_type_is_refused(options: dict[str, Any]) -> None:
    objective = Objective(build_model("mlp").module, build_model("mlp").sample)
    with pytest.raises(ConfigError, match=r"option '\w+' of algorithm"):
        algorithms.build("tcbgd", objective, **options)


def test_whole_numbers_are_numbers_and_lists_are_sequences() -> None:
    assert catalog.build(build_model("mlp"), "importance", gamma=1, dense=["head"]).kind == "importance"
    assert catalog.build(build_model("mlp"), "width", ratio=1).kind == "width"


# -- errors of user code -----------------------------------------------------------------------------------


def test_torch_behind_a_link_is_no_code_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(torch.__spec__, "origin", str(link / "torch" / "__init__.py"))
    monkeypatch.setattr(user_code, "_ours", runpy.run_path(user_code.__file__)["_ours"])

    assert not user_code.is_user_code(link / "torch" / "functional.py")
    assert not user_code.is_user_code(Path(torch.functional.__file__))
    assert user_code.is_user_code(Path(__file__))


class Slope(nn.Module):
    """Computes a gradient in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h + torch.autograd.grad(h.sum(), h, create_graph=True)[0])


class Energy(Slope):
    """Computes the gradient of its input in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.a(x).square().sum()
            return self.b(torch.autograd.grad(energy, x, create_graph=True)[0])


@pytest.mark.parametrize("kind", [Slope, Energy])
def test_a_gradient_in_forward_is_refused_with_what_to_call_instead(kind: type[Slope]) -> None:
    with pytest.raises(EdgeflError, match=r"found a gradient computed .* torch\.func\.vjp") as refused:
        edgefl.compile(edgefl.Model(kind(), sample=TensorSpec((3,)), classes=3))

    assert "test_split.py" in refused.value.message


def test_ctc_of_torch_is_refused_with_the_loss_to_use() -> None:
    def ctc(out: Tensor, y: Tensor) -> Tensor:
        times, lengths = torch.full((len(out),), 6), torch.full((len(out),), 2)
        return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), y, times, lengths)

    loss = edgefl.losses.own_loss(ctc, labels=TensorSpec((2,), torch.int64, below=5))
    with pytest.raises(EdgeflError, match=r"edgefl\.losses\.CTC\(length\)"):
        edgefl.compile(
            edgefl.Model(nn.Linear(8, 5), sample=TensorSpec((6, 8)), classes=5),
            training=edgefl.Training(loss=loss),
        )
