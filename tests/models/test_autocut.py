"""Automatic cuts: a plain module becomes units that compute the same, cut between its blocks and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import trainable_copy
from edgefl.models.losses import SequenceCrossEntropy
from edgefl.models.partition.partitioner import balanced_starts
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from tests.models import plain
from tests.pairs import slow
from tests.rings.rows import mostly_slow

IMAGE = TensorSpec((3, 8, 8))
WORDS = TensorSpec((6,), torch.int64, 20)

# Each with the units that its author would name.
CASES: dict[str, tuple[Callable[[], nn.Module], TensorSpec, tuple[str, ...]]] = {
    "resnet": (plain.ResNet, IMAGE, ("conv", "layer_0", "layer_1", "fc")),
    "mobilenet": (plain.MobileNet, IMAGE, ("features_0", "features_2", "features_3", "classifier_1")),
    "bert": (plain.Bert, WORDS, ("words", "layers_0", "layers_1", "pooler", "classifier")),
    "vit": (plain.Vit, IMAGE, ("patches", "blocks_0", "blocks_1", "head")),
    "bilstm": (plain.BiLstm, WORDS, ("embedding", "lstm", "head")),
    "convnext": (
        plain.ConvNext,
        IMAGE,
        (
            *("stages_0_shrink", "stages_0_blocks_0", "stages_0_blocks_1"),
            *("stages_1_shrink", "stages_1_blocks_0", "stages_1_blocks_1"),
            "head",
        ),
    ),
    "branches": (plain.Branches, IMAGE, ("stem", "left", "mix", "first", "head")),
    "bare": (plain.Bare, TensorSpec((3, 4)), ("w1", "w2")),
}

QUICK = ("resnet", "bert", "branches", "bare")


@cache
def _made(case: str) -> tuple[nn.Module, ModelSpec]:
    torch.manual_seed(0)
    make, sample, _ = CASES[case]
    module = make()
    return module, split(module, sample=sample, classes=5)


def _random(sample: TensorSpec, rows: int) -> Tensor:
    shape = (rows, *sample.shape)
    return torch.randint(0, 20, shape) if sample.dtype is torch.int64 else torch.randn(shape)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK))
def test_a_plain_module_is_cut_between_blocks_and_computes_the_same(case: str) -> None:
    module, spec = _made(case)
    assert spec.units == CASES[case][2]

    for rows in (1, 2, 3):
        x = _random(spec.sample, rows)
        torch.testing.assert_close(spec.module.eval()(x), module.eval()(x))

    reference, x = trainable_copy(module).train(), _random(spec.sample, 4)
    found, expected = spec.module.train()(x), reference(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in spec.module.named_parameters():
        original = _original(name, gradients)
        torch.testing.assert_close(parameter.grad, gradients.pop(original))
    assert not gradients


def _original(name: str, known: dict[str, Tensor | None]) -> str:
    """The name a tensor had: behind its unit's, or continued by a unit that is one submodule and took its name."""
    unit, _, rest = name.partition(".")
    if rest in known:
        return rest
    matches = [other for other in known if other.replace(".", "_") == f"{unit}_{rest.replace('.', '_')}"]
    assert len(matches) == 1, name
    return matches[0]


@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK))
def test_every_cut_trains_with_the_state_of_the_module(case: str) -> None:
    module, spec = _made(case)
    state = {key: value for key, value in trainable_copy(module).state_dict().items()}
    assert sum(t.numel() for t in spec.weights.values()) == sum(t.numel() for t in state.values())
    cut = len(spec.units) - 2
    objective = Objective(spec.part(cut, len(spec.units)), spec.boundary(cut), spec.loss)
    x, y = torch.randn(3, *spec.boundary(cut).shape), torch.zeros(3, dtype=torch.int64)
    params = {name: spec.weights[name] for name in objective.trainable}
    fixed = {name: spec.weights[name] for name in objective.fixed}
    loss, _, _ = objective(params, fixed, x, y)
    assert torch.isfinite(loss)


def test_the_next_words_of_a_language_model_are_units_too() -> None:
    spec = split(plain.LanguageModel(), sample=WORDS, classes=20, loss=SequenceCrossEntropy())
    assert spec.units == ("embedding", "lstm", "decoder")
    assert spec.label == TensorSpec((6,), torch.int64, 20)


ZOO: dict[str, dict[str, object]] = {
    "resnet8": {},
    "cnn": {},
    "mlp": {"size": 4, "hidden": [5, 4]},
    "vit": {},
    "bert": {},
    "bilstm": {"length": 8},
    "lstm_lm": {"length": 6, "vocabulary": 20, "features": 4, "hidden": 4},
}


@pytest.mark.parametrize("name", mostly_slow(ZOO, ["mlp"]))
def test_the_zoo_s_models_as_plain_modules_are_cut_where_their_units_end(name: str) -> None:
    spec = build_model(name, **ZOO[name])

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(spec.module)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    again = split(Plain(), sample=spec.sample, classes=spec.classes, loss=spec.loss)
    assert again.units == tuple(f"parts_{number}" for number in range(len(spec.units)))
    assert list(again.weights) == [
        f"parts_{spec.units.index(k.split('.')[0])}.{k.split('.', 1)[1]}" for k in spec.weights
    ]


def test_layers_stay_modules_so_that_they_are_found_and_named_as_before() -> None:
    spec = _made("resnet")[1]
    assert isinstance(spec.module.get_submodule("layer_0"), plain.Residual)
    assert isinstance(spec.module.get_submodule("conv.bn"), nn.BatchNorm2d)
    assert "conv.bn.running_mean" in spec.weights
    assert isinstance(spec.module.get_submodule("fc"), nn.Linear)


@pytest.mark.parametrize(("units", "made"), [(1, 1), slow(50, None)])
def test_at_most_as_many_units_as_asked_for(units: int, made: int | None) -> None:
    module, x = plain.Bare(), torch.randn(2, 3, 4)
    spec = split(module, sample=TensorSpec((3, 4)), classes=5, units=units)
    assert len(spec.units) == (made or len(split(module, sample=TensorSpec((3, 4)), classes=5).units))
    assert torch.equal(spec.module(x), module(x))
    with pytest.raises(ModelError, match="units=0"):
        split(module, sample=TensorSpec((3, 4)), classes=5, units=0)


@pytest.mark.parametrize(
    ("sizes", "groups", "starts"),
    [
        ([1, 1, 1, 9], 2, [3]),
        ([5, 1, 1, 5], 3, [1, 3]),
        ([9, 1, 1, 1], 3, [1, 3]),
        ([4, 4], 1, []),
        ([2, 3], 9, [1]),
    ],
)
def test_groups_are_balanced(sizes: list[int], groups: int, starts: list[int]) -> None:
    assert balanced_starts(sizes, groups) == starts


def test_a_sequential_is_cut_automatically_if_asked() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    assert split(layers, "auto", sample=IMAGE, classes=5).units == ("1", "4")


def _module(forward: Callable[[nn.Module, Tensor], object]) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    Net.forward = forward  # type: ignore[assignment, method-assign]
    return Net()


def _data(net: nn.Module, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.sum() > 0:
        h = -h
    return net.second(h)


def _mode(net: nn.Module, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.second(h * 2 if net.training else h)


def _mixed(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return net.second(net.first(x)).float()


FAULTS: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "data": (_data, r"cannot trace Net .*data-dependent.*test_autocut\.py:\d+\)\. .*torch\.where"),
    "batch": (lambda net, x: net.second(net.first(x).view(2, 4)), "turns the batch size into a constant"),
    "nothing": (lambda net, x: [net.first(x).shape], "returns no floating tensor; it returns list"),
    "chance": (
        lambda net, x: net.second(net.first(x) + torch.rand(4)),
        r"aten\.rand.*in Net draws random numbers in inference",
    ),
    "constant": (lambda net, x: torch.zeros(x.shape[0], 3), "not computed from its input"),
    "shape": (lambda net, x: net.second(net.first(x.t())), r"RuntimeError.*test_autocut\.py"),
    "mixed": (_mixed, r"torch\.autocast"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_cannot_be_cut_is_reported_with_its_reason(fault: str) -> None:
    forward, message = FAULTS[fault]
    with pytest.raises(ModelError, match=message):
        split(_module(forward), sample=TensorSpec((4,)), classes=3)


class Folding(nn.Module):
    """Code that notes on its own what each mode is for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.folded = nn.Linear(4, 4), nn.Linear(4, 3), False

    def train(self, mode: bool = True) -> Folding:
        self.folded = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h if self.folded else h * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", [Folding, lambda: _module(_mode)])
def test_code_that_depends_on_its_mode_stays_one_unit(module: Callable[[], nn.Module]) -> None:
    spec = split(module(), sample=(4,), classes=3)

    assert spec.units == ("model",)
    with pytest.raises(ModelError, match=r"computes aten\.mul.* in training where it computes second"):
        split(module(), ["first"], sample=TensorSpec((4,)), classes=3)


def test_looking_at_a_module_leaves_its_mode_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    module[1].train()
    before = [part.training for part in module.modules()]
    split(module, "auto", sample=TensorSpec((4,)), classes=3)

    assert [part.training for part in module.modules()] == before
    assert "training" not in vars(nn.Module)


def test_torch_writes_nothing_of_its_own_while_a_module_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        sys.stderr.write("a line of the user's")
        return net.second(net.first(x))

    with pytest.raises(ModelError, match="data-dependent"):
        split(_module(_data), sample=TensorSpec((4,)), classes=3)
    assert capfd.readouterr() == ("", "")

    split(_module(forward), sample=TensorSpec((4,)), classes=3)
    assert "a line of the user's" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_plain_rnn_is_cut_without_a_warning() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    assert split(Net(), sample=TensorSpec((5, 4)), classes=3).units == ("rnn", "head")


def test_writes_in_place_keep_their_order_in_every_unit() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask[1:] = 1
        h = net.first(x) * mask
        h.relu_()
        mask[2:] = 3
        return net.second(h) * mask[:3]

    net, x = _module(forward), torch.randn(3, 4)
    spec = split(net, sample=TensorSpec((4,)), classes=3)
    assert spec.units == ("first", "second")
    assert torch.equal(spec.module(x), net(x))


def test_what_is_computed_without_gradient_stays_without() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.first(x)
        return net.second(h)

    spec = split(_module(forward), sample=TensorSpec((4,)), classes=3)
    spec.module(torch.randn(2, 4)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in spec.module.named_parameters()}
    assert {name for name, grad in gradients.items() if grad is not None} == {"second.weight", "second.bias"}
