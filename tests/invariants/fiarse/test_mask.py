"""FIARSE invariants 1 to 8: the mask and its threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.importance.learnable import spec_arrays
from edgefl.submodels.importance.strategy import GroupingStrategy, consecutive, dense, maskable, stages
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.importance.thresholds import (
    FIVE_SIZES,
    FOUR_SIZES,
    Groups,
    Guards,
    check_gamma,
    cut,
    kept_count,
    scales,
    top_mask,
)
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from tests.invariants.fiarse.tiny import cut_vector, framework_default, small_models, vector
from tests.rings.rows import mostly_slow
from tests.support.errors import ModelError, refuses

TIED = vector(0.30, -0.80, 0.10, 0.50, -0.50, 0.20, 0.00, 0.90)
gammas = st.floats(0.001, 1.0)


def groupings(weights: Arrays) -> list[Groups]:
    """Model-wise, layer-wise, and two shards where there are two tensors."""
    names = tuple(weights)
    shards = (names[:1], names[1:]) if len(names) > 1 else (names,)
    return [(names,), tuple((name,) for name in names), shards]


@pytest.fixture(scope="module")
def resnet() -> ModelSpec:
    return framework_default(build_model("resnet18", bn="static"))


# 1. Count


@given(weights=small_models(), gamma=gammas)
def test_inv01_each_group_keeps_exactly_its_count(weights, gamma) -> None:
    for groups in groupings(weights):
        found = cut(weights, gamma, groups)
        for group, ranked in zip(groups, found.groups, strict=True):
            entries = sum(weights[name].size for name in group)
            expected = entries if gamma == 1 else max(1, math.floor(gamma * entries + 1e-9))
            assert sum(int(found.masks[name].sum()) for name in group) == ranked.kept == expected


def test_inv01_the_floor_has_a_tolerance() -> None:
    assert math.floor(0.29 * 100) == 28, "what floating point says"
    assert kept_count(0.29, 100) == 29
    assert (kept_count(0.001, 5), kept_count(0.999, 5), kept_count(1.0, 5)) == (1, 4, 5)


@pytest.mark.parametrize("entries", [7, 100, 999, 12_345, 11_164_362, 10**8, 3 * 10**9])
def test_inv01_a_size_in_percent_is_exact_for_models_of_any_size(entries: int) -> None:
    assert math.floor(0.29 * 10**8 + 1e-9) == 28_999_999, "what an absolute tolerance says"
    assert [kept_count(0.29, 10**8), kept_count(0.57, 10**8), kept_count(0.58, 10**8)] == [
        29 * 10**6,
        57 * 10**6,
        58 * 10**6,
    ]
    for percent in range(1, 101):
        assert kept_count(percent / 100, entries) == max(1, percent * entries // 100), percent
    assert kept_count(1 / 3, 3 * entries) == entries
    assert kept_count(math.nextafter(1.0, 0.0), entries) <= entries


@pytest.mark.parametrize(
    ("classes", "kept"),
    [
        (10, (174_443, 446_574, 697_772, 1_786_297, 2_791_090, 4_019_170, 7_145_191)),
        (100, (175_164, 448_421, 700_658, 1_793_685, 2_802_633, 4_035_791, 7_174_740)),
    ],
)
def test_inv01_the_k_table_of_resnet18(classes: int, kept: tuple[int, ...]) -> None:
    entries = {10: 11_164_362, 100: 11_210_532}[classes]
    sizes = (1 / 64, 0.04, 1 / 16, 0.16, 1 / 4, 0.36, 0.64)
    assert tuple(kept_count(gamma, entries) for gamma in sizes) == kept


def test_inv01_the_paper_s_sizes_are_squares_of_the_widths_of_slices() -> None:
    assert pytest.approx([(1 / 8) ** 2, (1 / 4) ** 2, (1 / 2) ** 2, 1.0]) == FOUR_SIZES
    assert pytest.approx([0.2**2, 0.4**2, 0.6**2, 0.8**2, 1.0]) == FIVE_SIZES


# 2. Magnitude


@given(weights=small_models(), gamma=gammas)
def test_inv02_nothing_kept_is_smaller_than_anything_dropped(weights, gamma) -> None:
    for groups in groupings(weights):
        found = cut(weights, gamma, groups)
        for group, ranked in zip(groups, found.groups, strict=True):
            size = np.concatenate([np.abs(weights[name]).ravel() for name in group])
            mask = np.concatenate([found.masks[name].ravel() for name in group])
            assert size[mask].min() >= size[~mask].max(initial=0.0)
            assert gamma == 1 or ranked.theta == size[mask].min()
            assert all(np.float32(found.theta[name]) == found.theta[name] for name in group)
            for name in group:
                assert (np.abs(weights[name])[found.masks[name]] >= found.theta[name]).all()


def test_inv02_the_parts_of_resnet18_hold_its_k_largest_entries_(resnet) -> None:
    weights, groups = spec_arrays(resnet), GroupingStrategy().groups(resnet)
    found = cut(weights, 1 / 64, groups)
    assert found.kept == len(found.entries.positions) == 174_443
    flat = np.concatenate([np.abs(weights[name]).ravel() for name in groups[0]])
    assert extract(weights, {"x": found.entries})["x"].shape == (174_443,)
    assert np.sort(flat)[-174_443] == found.groups[0].theta


# 3. Ties


@pytest.mark.parametrize(
    ("gamma", "theta", "kept"),
    [
        (3 / 8, 0.5, [1, 3, 7]),
        (1 / 4, 0.8, [1, 7]),
        (5 / 8, 0.3, [0, 1, 3, 4, 7]),
        (1.0, 0.0, list(range(8))),
    ],
)
def test_inv03_ties_go_to_the_lowest_index(gamma: float, theta: float, kept: list[int]) -> None:
    found, mask = cut_vector(TIED, gamma)
    assert found == np.float32(theta)
    assert np.flatnonzero(mask).tolist() == kept


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
def test_inv03_equal_entries_still_keep_exactly_k(value: float) -> None:
    theta, mask = cut_vector(np.full(8, value, np.float32), 3 / 8)
    assert np.flatnonzero(mask).tolist() == [0, 1, 2]
    assert theta == abs(np.float32(value))


def test_inv03_ties_across_tensors_go_to_the_earlier_tensor() -> None:
    weights = {"b": vector(0.5, 0.5), "a": vector(0.5, 2.0)}
    found = cut(weights, 0.5, (("b", "a"),))
    assert found.masks["b"].tolist() == [True, False]
    assert found.masks["a"].tolist() == [False, True]


# 4. Nesting


@given(
    weights=small_models(),
    sizes=st.tuples(gammas, gammas).map(sorted),
    guards=st.sampled_from([Guards(), Guards(relative=True), Guards(min_keep=1)]),
)
def test_inv04_a_smaller_submodel_lies_inside_a_larger_one(weights, sizes, guards) -> None:
    for groups in groupings(weights):
        try:
            small, large = (cut(weights, gamma, groups, guards, scales(weights)) for gamma in sizes)
        except ModelError:
            assert guards.min_keep, "only the guard may ask for more than there is"
            continue
        for name in weights:
            assert not (small.masks[name] & ~large.masks[name]).any()
        assert all(small.theta[name] >= large.theta[name] for name in weights) or guards.min_keep


# 5. Scale and sign


@given(weights=small_models(), gamma=gammas, factor=st.sampled_from([0.125, 2.0, 1024.0]))
def test_inv05_neither_scale_nor_sign_changes_the_mask(weights, gamma, factor) -> None:
    scaled = {name: array * np.float32(factor) for name, array in weights.items()}
    assume(
        all(np.array_equal(scaled[name] / np.float32(factor), weights[name]) for name in weights)
    )  # no underflow
    for groups in groupings(weights):
        found = cut(weights, gamma, groups)
        for changed in (factor, -factor, -1.0):
            other = cut({name: array * np.float32(changed) for name, array in weights.items()}, gamma, groups)
            assert all(np.array_equal(found.masks[name], other.masks[name]) for name in weights)
            assert all(other.theta[name] == found.theta[name] * abs(changed) for name in weights)


# 6. gamma = 1


def test_inv06_the_full_size_keeps_everything_at_threshold_zero() -> None:
    for guards in (Guards(), Guards(min_keep=3), Guards(dense=("x",)), Guards(relative=True)):
        found = cut({"x": TIED, "y": np.zeros(3, np.float32)}, 1.0, (("x", "y"),), guards, {"x": 1, "y": 1})
        assert all(mask.all() for mask in found.masks.values())
        assert set(found.theta.values()) == {0.0}


# 7. Layer-wise


@given(weights=small_models(), gamma=gammas)
def test_inv07_each_layer_keeps_its_own_share_and_one_group_is_model_wise(weights, gamma) -> None:
    layers = cut(weights, gamma, tuple((name,) for name in weights))
    for name, array in weights.items():
        assert int(layers.masks[name].sum()) == kept_count(gamma, array.size)
        alone = cut({name: array}, gamma, ((name,),))
        assert np.array_equal(alone.masks[name], layers.masks[name])
        assert alone.theta[name] == layers.theta[name]


def test_inv07_strategies_group_the_tensors_of_a_model(resnet) -> None:
    names = maskable(resnet)
    assert GroupingStrategy().groups(resnet) == (names,)
    assert GroupingStrategy("layer").groups(resnet) == tuple((name,) for name in names)
    shards = GroupingStrategy("shard").groups(resnet)
    assert tuple(name for shard in shards for name in shard) == names
    # The authors' six groups, with the parameter counts of fiarse.md 4.1.
    weights = spec_arrays(resnet)
    sizes = [sum(weights[name].size for name in shard) for shard in shards]
    assert sizes == [1_728, 147_456, 524_288, 2_097_152, 8_388_608, 5_130]


def test_inv07_units_are_grouped_into_runs_or_as_listed() -> None:
    spec = build_model("mlp", size=4, hidden=(5, 5, 5))
    assert consecutive(spec, 2) == (("dense1", "dense2"), ("dense3", "head"))
    assert consecutive(spec, 3) == (("dense1", "dense2"), ("dense3",), ("head",))
    assert stages(spec) == (("dense1",), ("dense2", "dense3"), ("head",))
    listed = GroupingStrategy(
        "shard", (("dense1.dense.weight",), ("dense1.dense.bias", "dense2", "dense3", "head"))
    )
    assert listed.groups(spec)[0] == ("dense1.dense.weight",)
    assert len(listed.groups(spec)[1]) == 7


@pytest.mark.parametrize(
    ("shards", "details"),
    [
        ((("dense1",), ("dense2",)), {"name": "head.dense.weight", "shards": (("dense1",), ("dense2",))}),
        (
            (("dense1", "dense2"), ("dense2", "head")),
            {"name": "dense2.dense.weight", "shards": (("dense1", "dense2"), ("dense2", "head"))},
        ),
        ((("dense1", "dense2", "head"), ("dense",)), {"shard": ("dense",)}),
    ],
)
def test_inv07_shards_that_do_not_partition_the_model_are_refused(shards, details: dict[str, object]) -> None:
    with refuses(ModelError, **details):
        GroupingStrategy("shard", shards).groups(build_model("mlp", size=4, hidden=(5, 5)))


# 8. Arbitrary gamma


@pytest.mark.parametrize(
    "gamma", mostly_slow([1 / 256, 1 / 128, 1 / 32, 0.123456, 0.5, 0.99, 1.0], [1 / 256, 0.123456, 0.99])
)
def test_inv08_any_size_can_be_cut(resnet, gamma: float) -> None:
    found = cut(spec_arrays(resnet), gamma, GroupingStrategy("layer").groups(resnet))
    names = maskable(resnet)
    sizes = [found.masks[name].size for name in names]
    assert sum(sizes) == 11_164_362
    assert [int(found.masks[name].sum()) for name in names] == [kept_count(gamma, size) for size in sizes]


@pytest.mark.parametrize("gamma", [0.0, -0.25, 1.0001, math.nan, math.inf])
def test_inv08_a_size_outside_0_to_1_is_refused(gamma: float) -> None:
    with pytest.raises(ModelError, match=r"gamma lies in \(0, 1\], found"):
        cut({"x": TIED}, gamma, (("x",),))


@pytest.mark.parametrize(
    ("weights", "groups", "message"),
    [
        ({"x": vector(1.0, math.nan)}, (("x",),), "'x' has entries that are NaN"),
        ({"x": vector(1.0, math.inf)}, (("x",),), "'x' has entries that are NaN or infinite"),
        ({"x": vector()}, (("x",),), "has no entries"),
        ({"x": TIED}, ((),), "has no entries"),
        ({"x": TIED}, (), "no group"),
        ({"x": TIED}, (("y",),), "'y' of a group is not among"),
        ({"x": TIED}, (("x",), ("x",)), "'x' of a group is listed twice"),
    ],
)
def test_inv08_what_cannot_be_ranked_is_refused(weights, groups, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cut(weights, 0.5, groups)


# -- fiarse.md 2.3, 2.6 and A9 at their edges ------------------------------------------------------------------


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
    assert np.flatnonzero(top_mask(np.array([1.0, 3.0, 1.0, 2.0, 1.0]), k)).tolist() == sorted(
        [1, 3, 0, 2, 4][:k]
    )


def test_inv01_a_count_just_below_a_whole_number_is_not_rounded_up() -> None:
    assert kept_count(0.5 - 1e-6, 4) == 1
    assert kept_count(0.5, 4) == 2
    assert kept_count(1e-12, 10) == 1
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
    with refuses(ModelError, name="b", scale=...):
        cut(SMALL_AND_LARGE, 0.5, ONE_GROUP, Guards(relative=True), given)
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
    assert scales({"x": np.zeros(3, np.float32)}) == {"x": 1.0}


@pytest.mark.parametrize("shards", [1, 3])
def test_inv07_as_many_shards_as_units_and_a_single_one(shards: int) -> None:
    spec = build_model("mlp", size=4, hidden=(5, 5))
    runs = consecutive(spec, shards)
    assert len(runs) == shards and [unit for run in runs for unit in run] == ["dense1", "dense2", "head"]
    assert len(GroupingStrategy("shard", shards).groups(spec)) == shards


@pytest.mark.parametrize("shards", [0, 4, -1])
def test_inv07_more_shards_than_units_or_none_are_refused(shards: int) -> None:
    with refuses(ModelError, shards=shards, units=("dense1", "dense2", "head")):
        consecutive(build_model("mlp", size=4, hidden=(5, 5)), shards)


def test_inv07_a_strategy_that_is_none_and_shards_of_another_are_refused() -> None:
    with refuses(ModelError, strategy="tensor"):
        GroupingStrategy("tensor")  # type: ignore[arg-type]
    with refuses(ModelError, strategy="layer", shards=2):
        GroupingStrategy("layer", 2)
    with refuses(ModelError, strategy="model", shards=0):
        GroupingStrategy(shards=0)


# -- fiarse.md A9: guards against submodels whose layers keep nothing --------------------------------------


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


@pytest.mark.parametrize(
    ("guards", "details"),
    [
        (Guards(dense=("lwo",)), {"pattern": "lwo", "names": ("low.weight", "high.weight")}),
        (Guards(relative=True), {"name": "low.weight", "scale": 0.0}),
    ],
)
def test_guard_without_weights_or_scales_is_refused(guards: Guards, details: dict[str, object]) -> None:
    with refuses(ModelError, **details):
        cut(pair(), 0.1, GROUP, guards)


def test_guard_min_keep_below_zero_is_refused() -> None:
    with refuses(ModelError, min_keep=-1):
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


# -- FIARSE 2.9: which tensors importance may thin out -----------------------------------------------------


# What is maskable (2.9)


@pytest.mark.parametrize(("classes", "entries"), [(10, 11_164_362), (100, 11_210_532)])
def test_maskable_resnet18_has_the_spec_s_counts(classes: int, entries: int) -> None:
    spec = build_model("resnet18", classes=classes, bn="static")
    weights = spec_arrays(spec)
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
        GroupingStrategy().groups(spec)


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
