"""FIARSE invariants 28, 30 and 31, and what fiarse.md A9 says about dead submodels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.importance.learnable import check_liveness, find_remedies, spec_arrays
from edgefl.submodels.importance.strategy import GroupingStrategy, maskable
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.importance.thresholds import (
    FOUR_SIZES,
    NO_GUARDS,
    Guards,
    ImportanceMasks,
    Mask,
    cut,
    scales,
)
from edgefl.submodels.output_side.submodel import OutputSide
from reproduce.fiarse.measures import exploration
from tests.invariants.fiarse.tiny import cut_vector, framework_default, he_fan_out, mac_fraction, vector
from tests.rings.rows import mostly_slow
from tests.support.arrays import as_tensors
from tests.support.errors import ModelError, refuses

SIZES = (0.1, 0.4)


class VectorCut:
    """Submodel of one tensor x, of a size."""

    def __init__(self, size: float) -> None:
        self.size = size

    def cut_of(self, weights: Mapping[str, np.ndarray]) -> VectorCut:
        self.masks: dict[str, Mask] = {"x": cut_vector(weights["x"], self.size)[1]}
        return self


def moves(*vectors: np.ndarray) -> dict[str, list[tuple[float, float]]]:
    """Return the curves of rounds that begin with these values."""
    first, *after = ({"x": x} for x in (*vectors, vectors[-1]))
    return exploration(first, enumerate(after), {size: VectorCut(size) for size in SIZES})  # type: ignore[misc]


def cut_model(
    spec: ModelSpec, gamma: float, guards: Guards = NO_GUARDS, kind: str = "model"
) -> ImportanceMasks:
    weights = spec_arrays(spec)
    groups = GroupingStrategy(kind).groups(spec)  # type: ignore[arg-type]
    return cut(weights, gamma, groups, guards, scales(weights))


# 28. Exploration


@given(seed=st.integers(0, 999), count=st.integers(1, 8))
def test_inv28_coverage_never_falls_and_begins_at_the_size_s_share(seed, count) -> None:
    generator = np.random.default_rng(seed)
    lines = moves(*(generator.normal(size=50).astype(np.float32) for _ in range(count)))
    for size in SIZES:
        explored = [share for _, share in lines[f"explored {size}"]]
        assert explored == sorted(explored) and explored[0] == size and explored[-1] <= 1.0


def test_inv28_exploration_and_difference_by_hand() -> None:
    # k = 1 and 4 of 10; the largest entries move from the front to the back.
    first = vector(9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
    second = vector(8, 9, 7, 0, 5, 6, 3, 2, 1, 0)
    lines = moves(first, second, first[::-1].copy())
    assert lines["ever trained"] == [(0, 0.4), (1, 1.0), (2, 1.0)]
    assert lines["explored 0.1"] == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert lines["explored 0.4"] == [(0, 0.4), (1, 0.5), (2, 0.9)]
    # second to third of size .4: {0, 1, 2, 5} to {6, 7, 8, 9}
    assert lines["moved 1 0.1"] == [(1, 1.0), (2, 1.0)] and lines["moved 1 0.4"] == [(1, 0.25), (2, 1.0)]


def test_inv28_equal_masks_differ_by_nothing_at_any_lag() -> None:
    x = np.random.default_rng(5).normal(size=30).astype(np.float32)
    lines = moves(*(x * np.float32(scale) for scale in range(1, 13)))
    for size in SIZES:
        assert [y for _, y in lines[f"moved 1 {size}"]] == [0] * 11
        assert lines[f"moved 10 {size}"] == [(10, 0), (11, 0)]


# 30. Evaluation


def test_inv30_evaluation_never_writes_to_the_global_model() -> None:
    spec = framework_default(build_model("resnet8", size=8, widths=(4, 6, 8)))
    before = {name: array.tobytes() for name, array in spec_arrays(spec).items()}
    found = cut_model(spec, 1 / 4)
    objective = Objective.of(OutputSide(spec, 0))
    masked = as_tensors(found.apply(spec_arrays(spec)))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, *spec.sample.shape, generator=generator)
    whole = objective.predict(spec.weights, x)
    assert not torch.equal(objective.predict(masked, x), whole)
    objective.evaluate(masked, x, torch.zeros(6, dtype=torch.int64), torch.ones(6))
    check_liveness(spec, found)
    assert {name: array.tobytes() for name, array in spec_arrays(spec).items()} == before


# 31. Liveness


@pytest.fixture(scope="module")
def resnet() -> ModelSpec:
    return framework_default(build_model("resnet18", size=8, bn="static"))


@pytest.fixture(scope="module")
def mlp() -> ModelSpec:
    return framework_default(build_model("mlp", hidden=(256, 128)))


@pytest.fixture(scope="module")
def he() -> ModelSpec:
    return he_fan_out(build_model("resnet18", size=8, bn="static", widths=(16, 32, 64, 128)))


def fan_in(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])


def test_inv31_resnet18_at_1_64_keeps_what_a9_says_and_is_alive(resnet) -> None:
    found = cut_model(resnet, 1 / 64)
    report = check_liveness(resnet, found)
    deep = [n for n, m in found.masks.items() if m.ndim == 4 and m.shape[2] == 3 and fan_in(m.shape) >= 2304]
    assert len(deep) == 7
    assert all(report.kept[name] == 0.0 for name in deep)
    assert report.kept["stem.conv.weight"] == pytest.approx(0.85, abs=0.015)
    stage1 = [report.kept[f"block{b}.conv{c}.weight"] for b in (1, 2) for c in (1, 2)]
    assert np.mean(stage1) == pytest.approx(0.30, abs=0.015)
    shortcuts = [report.kept[f"block{block}.shortcut.conv.weight"] for block in (3, 5, 7)]
    assert max(shortcuts) == pytest.approx(0.78, abs=0.025)
    assert min(shortcuts) == pytest.approx(0.53, abs=0.015)
    assert report.kept["head.dense.weight"] == pytest.approx(0.34, abs=0.015)
    assert report.classifier == "head.dense.weight"
    assert report.alive and report.reads_input and report.trains_below and report.keeps_classifier
    assert set(deep) <= set(report.empty)


@pytest.mark.parametrize(
    ("gamma", "fraction"), mostly_slow([(1 / 64, 0.104), (1 / 4, 0.478)], [(1 / 64, 0.104)])
)
def test_inv31_the_mac_fraction_at_initialisation(resnet, gamma: float, fraction: float) -> None:
    usual = replace(resnet, sample=TensorSpec((3, 32, 32)))
    assert mac_fraction(usual, cut_model(resnet, gamma)) == pytest.approx(fraction, abs=0.01)


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 16])
def test_inv31_an_mlp_s_first_layer_keeps_nothing_so_it_is_dead(mlp, gamma: float) -> None:
    report = check_liveness(mlp, cut_model(mlp, gamma))
    assert report.kept["dense1.dense.weight"] == report.kept["dense1.dense.bias"] == 0.0
    assert "dense1.dense.weight" in report.empty
    assert report.keeps_classifier
    assert not report.reads_input
    assert not report.alive


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 16])
@pytest.mark.parametrize(
    ("guards", "kind"),
    [
        (Guards(min_keep=1024), "model"),
        (Guards(relative=True), "model"),
        (NO_GUARDS, "shard"),
        (NO_GUARDS, "layer"),
    ],
)
def test_inv31_guards_revive_the_mlp_at_the_same_size(mlp, gamma: float, guards: Guards, kind: str) -> None:
    found = cut_model(mlp, gamma, guards, kind)
    report = check_liveness(mlp, found)
    assert report.alive, report
    assert report.guards == guards
    # A group loses less than one entry to its floor, and a bias that has too few keeps one all the same.
    assert abs(found.kept - gamma * 235_146) < len(found.groups)


def test_inv31_a_dense_first_layer_revives_the_mlp(mlp) -> None:
    guards = Guards(dense=("dense1", "head"))
    with refuses(
        ModelError, guard="dense", k=14696, needed=202250, gamma=0.0625, smallest_gamma=...
    ) as refused:
        cut_model(mlp, 1 / 16, guards)
    smallest = refused.value.details["smallest_gamma"]
    assert smallest == pytest.approx(202_250 / 235_146, abs=2e-6)
    found = cut_model(mlp, 0.9, guards)
    assert check_liveness(mlp, found).alive


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 16])
def test_inv31_a_dense_classifier_revives_he_fan_out(he, gamma: float) -> None:
    dead = check_liveness(he, cut_model(he, gamma))
    assert dead.kept["head.dense.weight"] == 0.0
    assert not dead.keeps_classifier and not dead.trains_below and not dead.alive
    guarded = cut_model(he, gamma, Guards(dense=("stem", "head")))
    assert guarded.kept == math.floor(gamma * sum(he.weights[name].numel() for name in maskable(he)))
    assert check_liveness(he, guarded).alive


def test_inv31_remedies_are_the_guards_that_work(mlp) -> None:
    working = find_remedies(mlp, 1 / 16)
    assert Guards(relative=True) in [guards for _, guards in working]
    assert GroupingStrategy("shard") in [strategy for strategy, _ in working]
    assert not any(guards.dense for _, guards in working), "the first layer is larger than the submodel"
    assert sum(guards.min_keep > 0 for _, guards in working) == 1, "the smallest that does"
    for strategy, guards in working:
        assert check_liveness(mlp, cut_model(mlp, 1 / 16, guards, strategy.kind)).alive


def test_inv31_a_dead_submodel_warns_with_what_revives_it(mlp) -> None:
    weights = spec_arrays(mlp)
    (text,) = importance(mlp, gamma=1 / 16).warnings(weights)
    assert "gamma 0.0625" in text and "dense1.dense.weight, dense1.dense.bias keep nothing" in text
    assert "relative = true" in text and 'strategy = "shard"' in text and "dense =" not in text
    working = [{"relative": True}, {"strategy": "shard"}, {"strategy": "layer"}]
    for options in working:
        assert importance(mlp, gamma=1 / 16, **options).warnings(weights) == ()
    assert importance(mlp, gamma=1 / 2).warnings(weights) == importance(mlp).warnings(weights) == ()


def test_inv31_a_dead_submodel_that_no_guard_revives_is_told_to_grow() -> None:
    layers = [("first", nn.Linear(6, 5, bias=False)), ("last", nn.Linear(5, 3, bias=False))]
    spec = ModelSpec("linear", sequential(layers), TensorSpec((6,)), 3)
    weights = {name: np.full(array.shape, 0.1, np.float32) for name, array in spec_arrays(spec).items()}
    # The largest entries of the two layers lie on different hidden values.
    weights["first.weight"][0, 0] = weights["last.weight"][0, 1] = 1.0
    (text,) = importance(spec, gamma=1 / 45).warnings(weights)
    assert "no guard" in text and "larger gamma" in text


def test_inv31_an_unchecked_submodel_is_not_refused() -> None:
    layers = [("positions", Shift()), ("last", nn.LayerNorm(3))]
    spec = ModelSpec("biases", sequential(layers), TensorSpec((3,)), 3)
    spec.module.positions.dense.weight.requires_grad_(False)
    (text,) = importance(spec, gamma=0.5).warnings(spec_arrays(spec))
    assert "could not be checked" in text and "no kernel" in text


class Shift(nn.Module):
    """A dense layer, of which a test leaves the bias alone trained."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


@pytest.mark.sample(6)
@pytest.mark.parametrize("gamma", FOUR_SIZES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit", {"size": 8, "width": 12, "depth": 1, "rate": 0.1}),
        ("bert", {"length": 5, "vocabulary": 11, "width": 8, "depth": 1}),
        ("lstm_lm", {"length": 4, "vocabulary": 9, "features": 6, "hidden": 5}),
        ("resnet8", {"size": 8, "widths": (4, 6, 8)}),
    ],
)
def test_inv31_the_report_is_pure_for_any_model(name: str, options: dict[str, object], gamma: float) -> None:
    spec = build_model(name, **options)
    found = cut_model(spec, gamma, kind="layer")
    state = torch.get_rng_state()
    report = check_liveness(spec, found)
    assert torch.equal(torch.get_rng_state(), state)
    assert check_liveness(spec, found) == report
    assert report.alive or gamma < 1
    assert set(report.kept) == set(found.masks)


def test_inv31_a_gradient_where_nothing_is_kept_does_not_count() -> None:
    layers = [("first", nn.Linear(6, 5, bias=False)), ("last", nn.Linear(5, 3, bias=False))]
    spec = ModelSpec("linear", sequential(layers), TensorSpec((6,)), 3)
    weights = {
        "first.weight": np.full((5, 6), 0.1, np.float32),
        "last.weight": np.eye(3, 5, dtype=np.float32),
    }
    for gamma, trains in ((3 / 45, False), (18 / 45, True)):
        report = check_liveness(spec, cut(weights, gamma, GroupingStrategy().groups(spec)), weights)
        assert (report.kept["first.weight"] > 0) == report.trains_below == trains
        assert report.keeps_classifier


def test_inv31_a_model_that_is_only_a_classifier_has_nothing_below() -> None:
    spec = framework_default(build_model("mlp", size=4, hidden=()))
    assert check_liveness(spec, cut_model(spec, 1 / 4)).alive
