"""Weights with several uses are one tensor of the state, wherever a model is cut, and gradients of all uses add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.exits import with_exits
from edgefl.models.losses import SequenceCrossEntropy, SquaredError
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.models.split import split
from edgefl.models.tied import borrowed_names, collect_state
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.compaction.compact import compact
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.standalone import standalone
from edgefl.submodels.structured.submodel import Structured
from edgefl.submodels.width.submodel import Width
from tests.pairs import in_turn
from tests.parity.forms import checked
from tests.parity.rounds import exported, in_torch, local_data, on_device
from tests.support.errors import ModelError, refuses
from tests.support.gradients import assert_trains_as_torch
from tests.support.memory_bounds import m_forward

VOCABULARY, FEATURES = 12, 6
WORDS = TensorSpec((5,), torch.int64, VOCABULARY)
VECTOR = TensorSpec((8,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 10), nn.Linear(10, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Language(nn.Module):
    """A language model whose head is its embedding, as a layer of its own with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Functional(nn.Module):
    """The same without a layer for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * 2
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class Transposed(nn.Module):
    """An autoencoder that decodes by the transposes of its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Parameter(torch.randn(6, 8) / 3)
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.outer))
        x = torch.tanh(self.inner(x))
        return torch.tanh(x @ self.inner.weight) @ self.outer


class Twice(nn.Module):
    """One layer, called twice, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.again(torch.relu(self.first(x))))
        return self.head(torch.relu(self.again(x)))


def _layers() -> nn.Sequential:
    layers = nn.Sequential(nn.Embedding(VOCABULARY, FEATURES), Block(), nn.Linear(FEATURES, VOCABULARY))
    layers[2].weight = layers[0].weight
    return layers


def _repeated() -> nn.Sequential:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), layer)


# Its factory, its cuts, the units, and what its first unit borrows.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...] | None, tuple[str, ...], dict[str, str]]] = {
    "head": (Language, None, ("embed", "blocks_0", "blocks_1", "head"), {"embed.weight": "head.weight"}),
    "functional": (
        Functional,
        None,
        ("embed", "blocks_0", "blocks_1", "embed_"),
        {"embed.embed.weight": "embed_.embed.weight"},
    ),
    "one unit": (Language, ("head",), ("head",), {}),
    "transposed": (
        Transposed,
        None,
        ("outer", "inner", "inner_weight", "outer_"),
        {"outer.borrowed_outer.value": "outer_.outer"},
    ),
    "twice": (Twice, None, ("first", "again", "head"), {}),
    "twice, cut": (Twice, ("first", "again"), ("first", "again", "tail"), {}),
    "sequential": (_layers, None, ("0", "1", "2"), {"0.weight": "2.weight"}),
    "repeated": (_repeated, None, ("0", "1", "2", "3", "4"), {"0.weight": "4.weight", "0.bias": "4.bias"}),
}


@cache
def _made(case: str) -> tuple[nn.Module, ModelSpec]:
    factory, cuts, _, _ = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = factory()
    words = factory in (Language, Functional, _layers)
    sample, loss = (WORDS, SequenceCrossEntropy()) if words else (VECTOR, SquaredError())
    return module, split(module, cuts, sample=sample, classes=VOCABULARY if words else 1, loss=loss)


def _batch(spec: ModelSpec, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def drawn(spec: TensorSpec) -> Tensor:
        shape = (rows, *spec.shape)
        if spec.dtype.is_floating_point:
            return torch.randn(shape, generator=generator)
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    return {"batch.0.x": drawn(spec.sample), "batch.0.y": drawn(spec.label)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_it_is_cut_with_each_tensor_once_in_the_state(case: str) -> None:
    module, spec = _made(case)
    assert spec.units == CASES[case][2]
    assert borrowed_names(spec.part(0, 1)) == CASES[case][3]
    assert len(spec.weights) == len(list(module.parameters()))
    assert list(spec.weights) == [name for name, _ in spec.module.named_parameters()]
    x = _batch(spec)["batch.0.x"]
    torch.testing.assert_close(spec.module(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_its_gradient_is_the_sum_over_all_uses_as_in_torch(case: str) -> None:
    module, spec = _made(case)
    batch = _batch(spec)
    loss = spec.loss.each(module(batch["batch.0.x"]), batch["batch.0.y"]).mean()

    inputs = {"x": batch["batch.0.x"], "y": batch["batch.0.y"]}
    found, _ = assert_trains_as_torch(module, spec, loss, inputs)

    assert found.keys() == spec.weights.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_state_goes_back_into_the_users_module_by_all_its_names(case: str) -> None:
    _, spec = _made(case)
    trained = {name: torch.randn_like(tensor) for name, tensor in spec.weights.items()}

    module = CASES[case][0]()
    module.load_state_dict({own: trained[name] for own, name in spec.global_names.items()}, strict=True)

    x = _batch(spec)["batch.0.x"]
    there = torch.func.functional_call(skeleton(spec.module, training=False), trained, (x,))
    torch.testing.assert_close(there, module(x))


def test_uses_stay_in_one_unit_where_that_leaves_enough_of_them() -> None:
    module, spec = _made("twice")
    assert [len(list(unit.parameters())) for unit in spec.module] == [2, 2, 2]
    assert not borrowed_names(spec.part(0, 2))
    apart = split(module, ["first", "head"], sample=VECTOR, classes=1, loss=SquaredError())
    assert apart.units == ("first", "head")


@pytest.mark.parametrize("case", ["head", "functional", "sequential"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_tier_behind_the_cut_trains_the_tensor_by_its_use_there(case: str, cut: int) -> None:
    _, spec = _made(case)
    tier, batch, last = OutputSide(spec, cut), _batch(spec), spec.units[-1]
    assert last in tier.prefix[0].units and last in tier.units
    weights = {name: tensor.clone().requires_grad_() for name, tensor in spec.weights.items()}
    x = torch.func.functional_call(spec.module, weights, (batch["batch.0.x"],))
    assert x.requires_grad

    # The whole graph with a stop of the gradient at the boundary (embracingfl.md 7, I3).
    chunk = tier.prefix[0]
    names = borrowed_names(chunk.module)
    read = {name: weights[name] for name in chunk.module.state_dict()}
    read |= {path: weights[name] for path, name in names.items()}
    record = torch.func.functional_call(chunk.module, read, (batch["batch.0.x"],)).detach()
    held = {name: weights[name] for name in tier.holds}
    out = torch.func.functional_call(tier.suffix, held, (record,))
    loss = spec.loss.each(out, batch["batch.0.y"]).mean()
    expected = dict(zip(held, torch.autograd.grad(loss, list(held.values())), strict=True))

    found = gradient(Objective.of(tier), spec.weights, {**batch, "batch.0.x": record})[2]

    assert names and set(names.values()) <= expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_a_frozen_chunk_counts_what_it_borrows() -> None:
    _, spec = _made("head")
    chunk = OutputSide(spec, 2, 2).prefix[0]
    assert chunk.units == ("head",)  # the server publishes nothing for embed, which has no tensor of its own
    assert collect_state(chunk.module).keys() == {"head.weight"}
    assert m_forward(chunk, 1) >= VOCABULARY * FEATURES


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "cut", "form"), in_turn([("head", 1), ("functional", 0)], rare=[("functional", 2), ("head", 0)])
)
def test_a_round_on_the_device_equals_torchs(tmp_path: Path, case: str, cut: int, form: str) -> None:
    _, spec = _made(case)
    tier = exported(OutputSide(spec, cut), batch=4, steps=3, lr=0.1, form=form)
    data = local_data(spec, 9, seed=5)

    result, _ = on_device(tier, data, 11, tmp_path, form)

    expected = in_torch(tier, data, 11)
    assert result.update.keys() == expected.keys() == set(tier.submodel.holds)
    for name, value in expected.items():
        assert np.abs(result.update[name] - value.numpy()).max() <= 1e-5, name


def test_both_uses_agree_on_a_slice_of_its_width() -> None:
    module, spec = _made("head")
    half = Width(spec, 0.5)
    x = _batch(spec)["batch.0.x"]

    kernel = half.suffix.state_dict()["head.weight"]
    assert kernel.shape == (VOCABULARY, FEATURES // 2) and "embed.weight" not in half.regions()
    inner = half.suffix[1:3](F.embedding(x, kernel))
    torch.testing.assert_close(half.suffix(x), F.linear(inner, kernel, module.head.bias))
    step = sgd(Objective.of(half), batch=3).phases[0].function
    assert checked("onnx", step, 3).worst <= 1e-5


def test_sizes_of_a_tied_model_run_on_their_own() -> None:
    _, spec = _made("functional")
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    x = _batch(spec)["batch.0.x"]
    for tier in (OutputSide(spec, 2), Importance(spec, 0.3), Width(spec, 0.5)):
        out = standalone(tier, weights)(x)
        assert out.shape == (4, *WORDS.shape, VOCABULARY) and bool(out.isfinite().all())
    torch.testing.assert_close(standalone(OutputSide(spec, 2), weights)(x), spec.module(x))

    part = Importance(spec, 0.3)
    small = compact(spec, weights, part.cut_of(weights).masks)
    torch.testing.assert_close(small.spec.module(x), standalone(part, weights)(x))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["head", "repeated"])
@pytest.mark.parametrize("name", ["adamw", "fedbat", "scaffold", "swat"])
def test_any_algorithm_trains_it_as_one_tensor(case: str, name: str) -> None:
    _, spec = _made(case)
    for cut in (0, 2):
        step = algorithms.build(name, Objective.of(OutputSide(spec, cut)), batch=3).phases[0].function
        assert all(bool(value.isfinite().all()) for value in step(step.example(3)).values())


def test_its_strongest_channels_are_those_of_both_uses() -> None:
    _, spec = _made("head")
    part = Structured(spec, 0.5)
    kept = part.place({name: tensor.numpy() for name, tensor in spec.weights.items()}, 1)
    assert kept.payload["head.weight"].shape == part.suffix.state_dict()["head.weight"].shape
    step = algorithms.build("tcbgd", Objective.of(part), batch=3).phases[0].function
    assert all(bool(value.isfinite().all()) for value in step(step.example(3)).values())


def test_a_level_that_ends_before_the_tied_head_is_refused_with_the_pair() -> None:
    _, spec = _made("head")
    exits = with_exits(spec, ["blocks_0"])
    assert exits.level(2)
    with refuses(ModelError, exit=1, names=("embed.weight", "head.weight")):
        exits.level(1)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.norm(self.first(x))))


def test_what_a_forward_pass_moves_stays_in_one_unit() -> None:
    assert split(Statistics(), sample=VECTOR, classes=1, loss=SquaredError()).units == ("first", "head")
    with refuses(ModelError, cut="head", target="norm.running_mean"):
        split(Statistics(), ["first", "head"], sample=VECTOR, classes=1, loss=SquaredError())
    norm = nn.BatchNorm1d(8)
    with refuses(ModelError, names=("0.running_mean", "2.running_mean")):
        split(nn.Sequential(norm, nn.Linear(8, 8), norm), sample=VECTOR, classes=1, loss=SquaredError())
