"""Automatic cuts: a plain module becomes units that compute the same, cut between its blocks and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import trainable_copy
from edgefl.models.inputs import call_with_inputs
from edgefl.models.losses import SequenceCrossEntropy
from edgefl.models.partition.partitioner import balanced_starts
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.models import plain
from tests.models.plain import Dropping
from tests.pairs import slow
from tests.rings.rows import mostly_slow
from tests.support.errors import ModelError, refuses
from tests.support.gradients import assert_trains_as_torch

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
    with refuses(ModelError, units=0):
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
    with refuses(
        ModelError,
        training="aten.mul.Tensor(('%2', '2'), {})",
        inference="second((TensorSlot(index=0),), {}) of ['%2']",
        source=...,
    ):
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


# -- A model that looks at its samples again at its end ----------------------------------------------------


VOCABULARY, LENGTH, WIDTH, CLASSES = 11, 6, 8, 3
IDS = TensorSpec((LENGTH,), torch.int64, VOCABULARY)


class Mixed(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.across = nn.Linear(WIDTH, WIDTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.across(self.inside(x).tanh().transpose(1, 2)).transpose(1, 2)


class Last(nn.Module):
    """The logits at the last word that is no padding (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Mixed(), Mixed(), Mixed()])
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.score(x)
        place = torch.arange(ids.shape[1], device=ids.device) * (ids != 0)
        return logits[torch.arange(ids.shape[0], device=ids.device), place.argmax(-1)]


def last() -> Last:
    torch.manual_seed(0)
    return Last()


def spec_of(module: nn.Module) -> ModelSpec:
    return split(module, sample=IDS, classes=CLASSES)


def texts(rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator) * (
        torch.arange(LENGTH) < lengths
    )


def test_it_is_cut_by_its_layers_and_the_last_unit_reads_the_sample() -> None:
    spec = spec_of(last())

    assert spec.units == ("words", "blocks_0", "blocks_1", "blocks_2", "score")
    assert not spec.others  # nothing that data have to bring
    objectives = [Objective.of(OutputSide(spec, cut)) for cut in range(5)]
    assert [list(each.others(2)) for each in objectives] == [["sample"]] * 5
    assert objectives[3].others(2)["sample"] == IDS.rows(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [0, 3])
def test_its_gradient_is_that_of_the_module(cut: int) -> None:
    module, x = last(), texts()
    spec, y = spec_of(module), torch.tensor([0, 1, 2, 0, 1])
    batch = {"x": call_with_inputs(spec.part(0, cut), {"x": x}), "sample": x, "y": y}

    found, _ = assert_trains_as_torch(module, spec, nn.functional.cross_entropy(module(x), y), batch, cut)

    assert len(found) == (15, 6)[cut == 3]


def test_a_sum_with_the_sample_stays_in_one_unit() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c((x + self.b(self.a(x).relu())).relu()).relu())

    assert split(Residual(), sample=TensorSpec((4,)), classes=4).units == ("a", "c", "d")


# -- dropout written as a function, wherever it lies -------------------------------------------------------


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
