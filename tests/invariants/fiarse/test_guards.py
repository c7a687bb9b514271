"""fiarse.md A9: guards against submodels whose layers keep nothing."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.errors import ModelError
from edgefl.submodels.importance.thresholds import Groups, Guards, cut, scales
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from tests.invariants.fiarse.tiny import vector

# Guards (A9)


def pair() -> Arrays:
    """A tensor of small entries beside one of large ones."""
    generator = np.random.default_rng(0)
    return {
        "low.weight": generator.uniform(-0.1, 0.1, (20, 10)).astype(np.float32),
        "high.weight": generator.uniform(-1.0, 1.0, 300).astype(np.float32),
    }


GROUP: Groups = (("low.weight", "high.weight"),)


def test_guard_min_keep_holds_the_largest_of_every_tensor() -> None:
    weights = pair()
    plain, guarded = cut(weights, 0.1, GROUP), cut(weights, 0.1, GROUP, Guards(min_keep=7))
    assert not plain.masks["low.weight"].any()
    assert plain.kept == guarded.kept == 50
    low = np.abs(weights["low.weight"])
    assert guarded.masks["low.weight"].sum() == 7
    assert low[guarded.masks["low.weight"]].min() >= low[~guarded.masks["low.weight"]].max()
    assert guarded.theta["low.weight"] == low[guarded.masks["low.weight"]].min()
    assert guarded.theta["high.weight"] == np.sort(np.abs(weights["high.weight"]))[-43]


def test_guard_min_keep_that_changes_nothing_leaves_the_thresholds_alone() -> None:
    weights = pair()
    plain, guarded = cut(weights, 0.6, GROUP), cut(weights, 0.6, GROUP, Guards(min_keep=5))
    assert plain.masks["low.weight"].sum() > 5
    assert all(np.array_equal(plain.masks[name], guarded.masks[name]) for name in weights)
    assert plain.theta == guarded.theta


def test_guard_min_keep_keeps_all_of_a_tensor_that_has_fewer() -> None:
    weights = {"bias": vector(0.0, 0.01), "weight": pair()["high.weight"]}
    found = cut(weights, 0.2, (("bias", "weight"),), Guards(min_keep=5))
    assert found.masks["bias"].all()
    assert found.theta["bias"] == 0.0


@pytest.mark.parametrize("pattern", ["low", "low.weight", "lo*", "*w.weight"])
def test_guard_dense_holds_a_tensor_whole_at_threshold_zero(pattern: str) -> None:
    found = cut(pair(), 0.5, GROUP, Guards(dense=(pattern,)))
    assert found.masks["low.weight"].all()
    assert found.theta["low.weight"] == 0.0
    assert found.kept == 250
    assert found.masks["high.weight"].sum() == 50
    assert found.theta["high.weight"] == np.sort(np.abs(pair()["high.weight"]))[-50]


def test_guard_relative_ranks_by_spread() -> None:
    weights = pair()
    spread = scales(weights)
    found = cut(weights, 0.25, GROUP, Guards(relative=True), spread)
    importance = {name: np.abs(array).astype(np.float64) / spread[name] for name, array in weights.items()}
    order = np.sort(np.concatenate([value.ravel() for value in importance.values()]))
    for name, array in weights.items():
        assert np.array_equal(found.masks[name], importance[name] >= order[-125])
        assert found.theta[name] == pytest.approx(order[-125] * spread[name], rel=1e-6)
        assert np.array_equal(np.abs(array) >= found.theta[name], found.masks[name])
    assert 0.15 < found.fractions["low.weight"] < 0.35


def test_guard_relative_keeps_the_order_of_neighbouring_floats() -> None:
    x = np.float32(1.99) + np.arange(8, dtype=np.float32) * np.float32(2**-23)
    assert len(set((x / np.float32(1.9)).tolist())) < 8 == len(set(x.tolist())), "they collide in float32"
    found = cut({"x": x}, 0.5, (("x",),), Guards(relative=True), {"x": 1.9})
    assert np.flatnonzero(found.masks["x"]).tolist() == [4, 5, 6, 7]


def test_guard_scales_are_standard_deviations() -> None:
    generator = np.random.default_rng(1)
    weights = {
        "a.weight": generator.normal(0, 0.5, 20_000).astype(np.float32),
        "a.bias": np.zeros(4, np.float32),
        "b.weight": np.full(3, 0.1, np.float32),
        "c.weight": generator.normal(0, 4.0, 20_000).astype(np.float32),
    }
    found = scales(weights)
    assert found["a.weight"] == pytest.approx(weights["a.weight"].std(), rel=1e-5)
    assert found["a.bias"] == pytest.approx(0.5, rel=0.03)
    everything = np.concatenate(list(weights.values()))
    assert found["b.weight"] == pytest.approx(everything.std(), rel=1e-5), "no spread in its layer either"
    assert scales({"x": np.zeros(3, np.float32)}) == {"x": 1.0}


@pytest.mark.parametrize(
    ("guards", "message"),
    [
        (Guards(dense=("low",)), r"guard dense alone keeps 200 of the 500 .* k=50; .* gamma >= 0\.4$"),
        (Guards(min_keep=30), r"guard min_keep alone keeps 60 .* gamma >= 0\.12$"),
        (Guards(min_keep=50, dense=("low",)), r"guard dense alone keeps|guard dense with min_keep"),
        (Guards(dense=("lwo",)), "no weight fits 'lwo'"),
        (Guards(relative=True), "'relative' needs a positive scale of 'low.weight'"),
    ],
)
def test_guard_that_cannot_be_kept_is_refused_with_what_would_fit(guards: Guards, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cut(pair(), 0.1, GROUP, guards)


def test_guard_errors_name_a_size_that_does_fit() -> None:
    with pytest.raises(ModelError) as refused:
        cut(pair(), 0.1, GROUP, Guards(dense=("low",), min_keep=3))
    smallest = refused.value.details["smallest_gamma"]
    assert isinstance(smallest, float)
    found = cut(pair(), smallest, GROUP, Guards(dense=("low",), min_keep=3))
    assert found.kept == 203
    assert found.masks["high.weight"].sum() == 3


def test_guard_min_keep_below_zero_is_refused() -> None:
    with pytest.raises(ModelError, match="at least 0, found -1"):
        Guards(min_keep=-1)


def test_a_cut_selects_so_that_nothing_outside_gets_in() -> None:
    weights = pair()
    found = cut(weights, 0.1, GROUP)
    poisoned = {
        name: np.where(found.masks[name], array, np.float32(np.nan)) for name, array in weights.items()
    }
    applied = found.apply(poisoned | {"norm.weight": vector(2.0)})
    assert all(
        np.array_equal(applied[name], np.where(found.masks[name], weights[name], 0)) for name in weights
    )
    assert applied["norm.weight"].tolist() == [2.0]
    values = extract(weights, {"values": found.entries})["values"]
    assert np.array_equal(values, np.concatenate([weights[n][found.masks[n]] for n in weights]))
