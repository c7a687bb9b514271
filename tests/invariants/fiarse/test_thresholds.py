"""fiarse.md 2.3, 2.6 and A9 at their edges: thresholds between float32 numbers, budgets that just do, guards together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgefl.errors import ModelError
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.importance.strategy import Strategy, consecutive
from edgefl.submodels.importance.thresholds import Guards, check_gamma, count, cut, scales, top
from edgefl.wire.tensors import Arrays
from tests.invariants.fiarse.tiny import vector

SMALL_AND_LARGE = {"a": vector(1.0, 2.0, 0.5), "b": vector(-5.0, 6.0, 0.25)}
ONE_GROUP = (("a", "b"),)


def test_inv02_every_tensor_of_a_group_has_the_group_s_threshold() -> None:
    made = cut(SMALL_AND_LARGE, 4 / 6, ONE_GROUP)
    assert made.masks["a"].tolist() == [True, True, False]
    assert made.masks["b"].tolist() == [True, True, False]
    assert dict(made.theta) == {"a": 1.0, "b": 1.0}
    assert [(group.names, group.entries, group.kept, group.theta) for group in made.groups] == [
        (("a", "b"), 6, 4, 1.0)
    ]


def test_inv02_parts_come_in_the_order_of_the_model() -> None:
    made = cut(SMALL_AND_LARGE | {"bias": vector(9.0)}, 0.5, (("b",), ("a",)))
    assert list(made.masks) == list(made.theta) == ["a", "b"]
    assert [group.names for group in made.groups] == [("b",), ("a",)]
    assert made.kept == 2
    assert made.entries.positions.tolist() == [1, 4] and made.entries.positions.dtype == np.int64
    assert made.fractions == {"a": pytest.approx(1 / 3), "b": pytest.approx(1 / 3)}
    applied = made.apply(SMALL_AND_LARGE | {"bias": vector(9.0)})
    assert {name: values.tolist() for name, values in applied.items()} == {
        "a": [0.0, 2.0, 0.0],
        "b": [0.0, 6.0, 0.0],
        "bias": [9.0],
    }


def test_inv06_the_whole_group_counts_as_kept() -> None:
    (group,) = cut(SMALL_AND_LARGE, 1.0, ONE_GROUP).groups
    assert (group.names, group.entries, group.kept, group.theta) == (("a", "b"), 6, 6, 0.0)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_inv03_ties_of_the_top_come_from_the_left(k: int) -> None:
    assert np.flatnonzero(top(np.array([1.0, 3.0, 1.0, 2.0, 1.0]), k)).tolist() == sorted([1, 3, 0, 2, 4][:k])


def test_inv01_a_count_just_below_a_whole_number_is_not_rounded_up() -> None:
    assert count(0.5 - 1e-6, 4) == 1
    assert count(0.5, 4) == 2
    assert count(1e-12, 10) == 1
    check_gamma(1.0)
    check_gamma(5e-324)
    with pytest.raises(ModelError) as refused:
        check_gamma(0.0)
    assert refused.value.details["gamma"] == 0.0


@pytest.mark.parametrize("scale", [1.9, 0.3, 7.7])
def test_a_relative_threshold_is_the_largest_that_takes_nothing(scale: float) -> None:
    weights = {"x": vector(0.1, 0.7, 0.3, 1.3), "y": vector(0.2, 0.9, 0.6, 1.1)}
    factors = {"x": scale, "y": 1.0}
    made = cut(weights, 0.5, (("x", "y"),), Guards(relative=True), factors)
    importance = {name: np.abs(w).astype(np.float64) / factors[name] for name, w in weights.items()}
    smallest = np.sort(np.concatenate(list(importance.values())))[-4]
    (group,) = made.groups
    assert group.theta == np.float32(group.theta) <= smallest
    assert float(np.nextafter(np.float32(group.theta), np.float32(np.inf))) > smallest
    for name, w in weights.items():
        assert np.array_equal(np.abs(w) >= made.theta[name], made.masks[name])
        if made.masks[name].any():
            assert made.theta[name] <= np.abs(w)[made.masks[name]].min()


def test_guards_that_take_the_budget_leave_the_largest_threshold() -> None:
    weights = {"low": vector(0.1, 0.2), "high": vector(1.0, -4.0, 2.0, 3.0)}
    made = cut(weights, 2 / 6, (("low", "high"),), Guards(dense=("low",)))
    assert made.masks["low"].all() and not made.masks["high"].any()
    assert made.groups[0].theta == 4.0
    assert dict(made.theta) == {"low": 0.0, "high": 4.0}


def test_a_guarded_entry_does_not_lower_the_threshold() -> None:
    weights = {"low": vector(0.1, 0.3), "high": vector(1.0, 2.0, 3.0)}
    made = cut(weights, 3 / 5, (("low", "high"),), Guards(min_keep=1))
    assert made.masks["low"].tolist() == [False, True]
    assert made.masks["high"].tolist() == [False, True, True]
    assert made.groups[0].theta == 2.0
    assert dict(made.theta) == {"low": float(np.float32(0.3)), "high": 2.0}


def test_a_guard_may_fill_the_budget_exactly() -> None:
    weights = {"low": vector(0.1, 0.2), "high": vector(1.0, 2.0)}
    assert cut(weights, 0.5, (("low", "high"),), Guards(min_keep=1)).kept == 2
    assert cut(weights, 0.5, (("low", "high"),), Guards(dense=("low",))).kept == 2
    with pytest.raises(ModelError) as refused:
        cut(weights, 0.5, (("low", "high"),), Guards(dense=("low",), min_keep=1))
    assert dict(refused.value.details) == {
        "guard": "dense with min_keep",
        "k": 2,
        "needed": 3,
        "gamma": 0.5,
        "smallest_gamma": 0.75,
    }
    assert "keeps 3 of the 4 entries of the 2 tensors that begin with 'low', but gamma=0.5 keeps k=2" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("guards", "guilty"),
    [
        (Guards(dense=("low",)), "dense"),
        (Guards(min_keep=1), "min_keep"),
        (Guards(dense=("low",), min_keep=1), "dense"),
    ],
)
def test_the_guard_that_asks_too_much_is_named(guards: Guards, guilty: str) -> None:
    weights = {"low": vector(0.1, 0.2), "high": vector(1.0, 2.0)}
    with pytest.raises(ModelError) as refused:
        cut(weights, 0.25, (("low", "high"),), guards)
    assert refused.value.details["guard"] == guilty


def test_the_size_that_would_do_is_rounded_up_so_that_it_does() -> None:
    weights = {"a": vector(0.1), "b": vector(1.0, 2.0)}
    with pytest.raises(ModelError) as refused:
        cut(weights, 0.4, ONE_GROUP, Guards(min_keep=1))
    assert refused.value.details["smallest_gamma"] == 0.666667
    assert cut(weights, 0.666667, ONE_GROUP, Guards(min_keep=1)).kept == 2
    with pytest.raises(ModelError):
        cut(weights, 0.666666, ONE_GROUP, Guards(min_keep=1))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, None])
def test_a_scale_that_is_no_scale_is_refused_by_name(scale: float | None) -> None:
    given = {"a": 1.0} if scale is None else {"a": 1.0, "b": scale}
    with pytest.raises(ModelError, match="positive scale of 'b'") as refused:
        cut(SMALL_AND_LARGE, 0.5, ONE_GROUP, Guards(relative=True), given)
    assert refused.value.details["name"] == "b"
    plain = cut(SMALL_AND_LARGE, 0.5, ONE_GROUP, Guards(), given)
    assert plain.theta == cut(SMALL_AND_LARGE, 0.5, ONE_GROUP).theta, "scales are read where they matter"


def test_several_patterns_hold_all_that_any_of_them_fits() -> None:
    names = ("stem.weight", "stemless.weight", "head.weight")
    assert Guards(dense=("stem", "head.*")).whole(names) == {"stem.weight", "head.weight"}
    assert Guards(dense=("stem*",)).whole(names) == {"stem.weight", "stemless.weight"}
    assert Guards().whole(names) == frozenset()
    assert Guards() == Guards(min_keep=0, dense=(), relative=False)


def test_spread_is_that_of_the_population() -> None:
    initial: Arrays = {
        "one.weight": vector(1.0, 3.0),
        "one.bias": vector(2.0, 2.0),
        "two.weight": vector(7.0, 7.0),
        "two.bias": vector(5.0, 5.0),
    }
    assert scales(initial) == {
        "one.weight": 1.0,
        "one.bias": pytest.approx(math.sqrt(0.5)),
        "two.weight": 1.0,
        "two.bias": 1.0,
    }
    assert scales({"a": vector(0.0), "b": vector(4.0)}) == {"a": 2.0, "b": 2.0}


@pytest.mark.parametrize("shards", [1, 3])
def test_inv07_as_many_shards_as_units_and_a_single_one(shards: int) -> None:
    spec = build_model("mlp", size=4, hidden=(5, 5))
    runs = consecutive(spec, shards)
    assert len(runs) == shards and [unit for run in runs for unit in run] == ["dense1", "dense2", "head"]
    assert len(Strategy("shard", shards).groups(spec)) == shards


@pytest.mark.parametrize("shards", [0, 4, -1])
def test_inv07_more_shards_than_units_or_none_are_refused(shards: int) -> None:
    with pytest.raises(ModelError, match=rf"1\.\.3 shards; found {shards}"):
        consecutive(build_model("mlp", size=4, hidden=(5, 5)), shards)


def test_inv07_a_strategy_that_is_none_and_shards_of_another_are_refused() -> None:
    with pytest.raises(ModelError, match="one of model, layer, shard; found 'tensor'"):
        Strategy("tensor")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="belong to the strategy 'shard', found 'layer'"):
        Strategy("layer", 2)
    with pytest.raises(ModelError, match="belong to the strategy 'shard', found 'model'"):
        Strategy(shards=0)
