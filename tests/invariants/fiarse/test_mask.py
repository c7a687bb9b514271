"""FIARSE invariants 1 to 8: the mask and its threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.importance.learnable import own_weights
from edgefl.submodels.importance.strategy import Strategy, consecutive, maskable, stages
from edgefl.submodels.importance.thresholds import FIVE_SIZES, FOUR_SIZES, Groups, Guards, count, cut, scales
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from tests.invariants.fiarse.tiny import cut_vector, framework_default, small_models, vector
from tests.rings.rows import mostly_slow

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
    assert count(0.29, 100) == 29
    assert (count(0.001, 5), count(0.999, 5), count(1.0, 5)) == (1, 4, 5)


@pytest.mark.parametrize("entries", [7, 100, 999, 12_345, 11_164_362, 10**8, 3 * 10**9])
def test_inv01_a_size_in_percent_is_exact_for_models_of_any_size(entries: int) -> None:
    assert math.floor(0.29 * 10**8 + 1e-9) == 28_999_999, "what an absolute tolerance says"
    assert [count(0.29, 10**8), count(0.57, 10**8), count(0.58, 10**8)] == [
        29 * 10**6,
        57 * 10**6,
        58 * 10**6,
    ]
    for percent in range(1, 101):
        assert count(percent / 100, entries) == max(1, percent * entries // 100), percent
    assert count(1 / 3, 3 * entries) == entries
    assert count(math.nextafter(1.0, 0.0), entries) <= entries


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
    assert tuple(count(gamma, entries) for gamma in sizes) == kept


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
    weights, groups = own_weights(resnet), Strategy().groups(resnet)
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


def test_inv03_the_comparison_alone_would_exceed_the_budget() -> None:
    theta, mask = cut_vector(TIED, 3 / 8)
    assert np.flatnonzero(np.abs(TIED) >= theta).tolist() == [1, 3, 4, 7]
    assert int(mask.sum()) == 3


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
        assert int(layers.masks[name].sum()) == count(gamma, array.size)
        alone = cut({name: array}, gamma, ((name,),))
        assert np.array_equal(alone.masks[name], layers.masks[name])
        assert alone.theta[name] == layers.theta[name]


def test_inv07_strategies_group_the_tensors_of_a_model(resnet) -> None:
    names = maskable(resnet)
    assert Strategy().groups(resnet) == (names,)
    assert Strategy("layer").groups(resnet) == tuple((name,) for name in names)
    shards = Strategy("shard").groups(resnet)
    assert tuple(name for shard in shards for name in shard) == names
    # The authors' six groups, with the parameter counts of fiarse.md 4.1.
    weights = own_weights(resnet)
    sizes = [sum(weights[name].size for name in shard) for shard in shards]
    assert sizes == [1_728, 147_456, 524_288, 2_097_152, 8_388_608, 5_130]


def test_inv07_units_are_grouped_into_runs_or_as_listed() -> None:
    spec = build_model("mlp", size=4, hidden=(5, 5, 5))
    assert consecutive(spec, 2) == (("dense1", "dense2"), ("dense3", "head"))
    assert consecutive(spec, 3) == (("dense1", "dense2"), ("dense3",), ("head",))
    assert stages(spec) == (("dense1",), ("dense2", "dense3"), ("head",))
    listed = Strategy("shard", (("dense1.dense.weight",), ("dense1.dense.bias", "dense2", "dense3", "head")))
    assert listed.groups(spec)[0] == ("dense1.dense.weight",)
    assert len(listed.groups(spec)[1]) == 7


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (9, r"1\.\.3 shards; found 9"),
        ((("dense1",), ("dense2",)), r"'head\.dense\.weight' lies in 0 shards"),
        ((("dense1", "dense2"), ("dense2", "head")), r"'dense2\.dense\.weight' lies in 2 shards"),
        ((("dense1", "dense2", "head"), ("dense",)), r"shard \('dense',\) holds no weights"),
    ],
)
def test_inv07_shards_that_do_not_partition_the_model_are_refused(shards, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Strategy("shard", shards).groups(build_model("mlp", size=4, hidden=(5, 5)))


# 8. Arbitrary gamma


@pytest.mark.parametrize(
    "gamma", mostly_slow([1 / 256, 1 / 128, 1 / 32, 0.123456, 0.5, 0.99, 1.0], [1 / 256, 0.123456, 0.99])
)
def test_inv08_any_size_can_be_cut(resnet, gamma: float) -> None:
    found = cut(own_weights(resnet), gamma, Strategy("layer").groups(resnet))
    names = maskable(resnet)
    sizes = [found.masks[name].size for name in names]
    assert sum(sizes) == 11_164_362
    assert [int(found.masks[name].sum()) for name in names] == [count(gamma, size) for size in sizes]


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
