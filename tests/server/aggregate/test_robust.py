"""Robust rules: their laws, what bad updates can do to them, and the norm of a change."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ConfigError
from edgefl.wire.regions import BlockRegion, EntryRegion, Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE, SIGNS, CodeEncoding, FloatEncoding, Form, Section, SparseEncoding
from edgefl_server.aggregate.robust import (
    MEAN,
    Floats,
    Held,
    RobustRule,
    change_norm,
    clip_factor,
    combine,
    unprotected,
)

MEDIAN = RobustRule("median")
RULES = [
    MEAN,
    MEDIAN,
    RobustRule("trimmed_mean", 0.1),
    RobustRule("trimmed_mean", 0.25),
    RobustRule("trimmed_mean", 0.49),
]
on_rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.trim}")


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Floats, Held]:
    """Values and holes; NaN stands in the holes, where nothing may be read."""
    updates, entries = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    numbers = st.floats(-1000, 1000, width=32)
    values = np.array(
        draw(st.lists(numbers, min_size=updates * entries, max_size=updates * entries)), np.float32
    )
    marks = draw(st.lists(st.booleans(), min_size=updates * entries, max_size=updates * entries))
    held = np.array(marks).reshape(updates, entries)
    return np.where(held, values.reshape(updates, entries), np.float32(np.nan)), held


def by_hand(column: list[float], rule: RobustRule) -> float:
    if rule.name == "median":
        return statistics.median(column)
    drop = math.floor(rule.trim * len(column))
    left = sorted(column)[drop : len(column) - drop]
    return math.fsum(left) / len(left)


@pytest.mark.sample(2)
@on_rules
@given(given_round=rounds())
def test_a_rule_follows_its_definition(rule: RobustRule, given_round: tuple[Floats, Held]) -> None:
    values, held = given_round

    result, anyone = combine(values, held, rule)

    assert result.dtype == np.float64 and anyone.tolist() == held.any(axis=0).tolist()
    for entry in range(values.shape[1]):
        column = values[held[:, entry], entry].astype(float).tolist()
        expected = by_hand(column, rule) if column else 0.0
        assert result[entry] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.sample(2)
@on_rules
@given(given_round=rounds(), seed=st.integers(0, 1000))
def test_order_changes_no_bit(rule: RobustRule, given_round: tuple[Floats, Held], seed: int) -> None:
    values, held = given_round
    order = np.random.default_rng(seed).permutation(len(values))

    first, second = combine(values, held, rule), combine(values[order], held[order], rule)

    assert first[0].tobytes() == second[0].tobytes() and first[1].tobytes() == second[1].tobytes()


@on_rules
def test_signed_zeros_do_not_show_which_came_first(rule: RobustRule) -> None:
    values, held = np.array([[-0.0], [0.0]], np.float32), np.ones((2, 1), bool)

    assert combine(values, held, rule)[0].tobytes() == combine(values[::-1], held, rule)[0].tobytes()


@on_rules
@given(given_round=rounds())
def test_a_result_lies_between_its_holders(rule: RobustRule, given_round: tuple[Floats, Held]) -> None:
    values, held = given_round

    result, anyone = combine(values, held, rule)

    lowest = np.where(held, values, np.inf).min(axis=0)
    highest = np.where(held, values, -np.inf).max(axis=0)
    assert ((lowest <= result) & (result <= highest))[anyone].all()


@on_rules
@given(given_round=rounds(), shift=st.integers(-64, 64))
def test_a_shift_moves_the_result(rule: RobustRule, given_round: tuple[Floats, Held], shift: int) -> None:
    values, held = given_round
    exact = values.astype(np.float64)

    moved = combine(exact + shift, held, rule)[0] - combine(exact, held, rule)[0]

    np.testing.assert_allclose(moved[held.any(axis=0)], shift, atol=1e-9)


@given(given_round=rounds())
def test_trimming_a_share_of_nobody_is_the_mean(given_round: tuple[Floats, Held]) -> None:
    values, held = given_round

    trimmed = combine(values, held, RobustRule("trimmed_mean", 0.1))[0]
    assert trimmed.tobytes() == combine(values, held)[0].tobytes()


def test_mean_of_equal_float64_is_that_number() -> None:
    values = np.full((3, 1), 0.1)  # 0.1 + 0.1 + 0.1 over 3 is above 0.1

    assert combine(values, np.ones((3, 1), bool))[0][0] == 0.1


@pytest.mark.parametrize(
    ("trim", "holders", "expected"),
    # 0.29 * 100 is 28.999... in floats; a share of almost one half must leave one; 4 holders lose nothing to 0.2.
    [(0.29, 100, 29), (0.4999999999, 2, 0), (0.4, 5, 2), (0.2, 4, 0), (0.2, 5, 1)],
)
def test_trimmed_mean_drops_the_floor(trim: float, holders: int, expected: int) -> None:
    powers = 1.001 ** np.arange(holders)[:, None]

    result, _ = combine(powers, np.ones((holders, 1), bool), RobustRule("trimmed_mean", trim))

    assert result[0] == pytest.approx(powers[expected : holders - expected].mean(), rel=1e-12)


def test_blocks_do_not_show() -> None:
    rng = np.random.default_rng(3)
    values, held = rng.normal(size=(8, 70_000)), rng.random((8, 70_000)) < 0.5

    whole = combine(values, held, MEDIAN)[0]

    parts = [combine(values[:, s : s + 999], held[:, s : s + 999], MEDIAN)[0] for s in range(0, 70_000, 999)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_no_updates_and_no_entries_are_held_by_nobody() -> None:
    result, anyone = combine(np.zeros((0, 4), np.float32), np.zeros((0, 4), bool), MEDIAN)
    assert result.tolist() == [0.0] * 4 and not anyone.any()
    assert combine(np.zeros((3, 0), np.float32), np.zeros((3, 0), bool), MEDIAN)[0].shape == (0,)


def test_values_and_marks_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="must both be"):
        combine(np.zeros((2, 3)), np.ones((2, 4), bool))


@pytest.mark.parametrize("attack", ["huge", "flipped"])
@pytest.mark.parametrize("rule", [MEDIAN, RobustRule("trimmed_mean", 0.25)], ids=lambda rule: rule.name)
def test_poisoned_updates_cannot_leave_the_honest_range(rule: RobustRule, attack: str) -> None:
    rng = np.random.default_rng(7)
    honest = (1 + 0.1 * rng.normal(size=(9, 500))).astype(np.float32)
    poison = np.full((2, 500), 1e6, np.float32) if attack == "huge" else -10 * honest[:2]
    # Holes: each honest device lacks some entries, but at least six of nine hold each; the attackers hold all.
    held_by_honest = rng.random((9, 500)) < 0.7
    held_by_honest[:6] |= held_by_honest.sum(axis=0) < 6
    values, held = np.vstack([poison, honest]), np.vstack([np.ones((2, 500), bool), held_by_honest])
    lowest = np.where(held_by_honest, honest, np.inf).min(axis=0)
    highest = np.where(held_by_honest, honest, -np.inf).max(axis=0)

    result, _ = combine(values, held, rule)
    mean, _ = combine(values, held)

    assert ((lowest <= result) & (result <= highest)).all()
    assert not ((lowest <= mean) & (mean <= highest)).any()  # the attack is one


@pytest.mark.parametrize(
    ("kind", "trim", "message"),
    [
        ("mode", 0.0, "choose one of mean, median"),
        ("trimmed_mean", 0.5, "below 0.5"),
        ("median", 0.1, "does not use"),
        ("trimmed_mean", 0.0, "or the rule mean"),
        ("multi_krum", 0.0, "multi_krum with trim 0"),
    ],
)
def test_rule_that_cannot_be_is_refused(kind: str, trim: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RobustRule(kind, trim)  # type: ignore[arg-type]


def test_only_the_mean_needs_no_buffer() -> None:
    assert [rule.buffered for rule in (MEAN, MEDIAN, RobustRule("trimmed_mean", 0.1))] == [False, True, True]


@pytest.mark.parametrize(
    ("rule", "open_to_one"),
    [
        (MEAN, []),  # promises nothing
        (MEDIAN, [1, 2]),
        (RobustRule("trimmed_mean", 0.1), [*range(1, 10)]),
        (RobustRule("trimmed_mean", 0.34), [1, 2]),
    ],
    ids=str,
)
def test_too_few_holders_are_not_protected(rule: RobustRule, open_to_one: list[int]) -> None:
    assert [holders for holders in range(13) if unprotected(rule, holders)] == open_to_one
    for holders in range(1, 13):
        values = np.ones((holders, 1))
        values[0] = 1e9
        moved = combine(values, np.ones((holders, 1), bool), rule)[0][0] > 2
        assert moved == (rule is MEAN or holders in open_to_one)


def test_clipping_shortens_long_changes_alone() -> None:
    assert clip_factor(4.0, 1.0) == 0.25 and clip_factor(2.5, 2.0) == 0.8
    assert clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == clip_factor(2.0, 2.0) == 1.0
    for limit in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="above 0"):
            clip_factor(1.0, limit)


SHAPES: dict[str, tuple[int, ...]] = {"w": (4, 3), "b": (4,), "n.running_var": (2,)}
BASE: Arrays = {name: np.full(shape, 2, np.float32) for name, shape in SHAPES.items()}
WHOLE: dict[str, Region] = dict.fromkeys(SHAPES)
STATISTICS = {"n.running_var"}


def norm(form: Form, arrays: Arrays, regions: dict[str, Region], base: Arrays = BASE) -> float:
    return change_norm(form, arrays, regions, SHAPES, base, without=STATISTICS)


def test_norm_of_dense_weights_leaves_out_statistics() -> None:
    arrays = {name: array.copy() for name, array in BASE.items()}
    arrays["w"][1, 2] += 3
    arrays["b"][0] -= 4
    arrays["n.running_var"][:] = 1e6

    assert norm(DENSE, arrays, WHOLE) == 5.0


def test_norm_of_plain_changes_does_not_read_the_weights() -> None:
    assert norm(Form(change=True), {"b": np.array([3, 0, -4, 0], np.float32)}, {"b": None}, {}) == 5.0


def test_norm_of_a_slice_and_of_single_entries_looks_at_the_entries_held() -> None:
    base = {**BASE, "w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(4, dtype=np.float32)}
    sliced: dict[str, Region] = {"w": BlockRegion(((3, 0), (1,)))}
    single: dict[str, Region] = {"values": EntryRegion(("w", "n.running_var", "b"), np.array([5, 12, 17]))}
    values = np.array([9, 1e6, 6], np.float32)  # from 5, -, 3 at b[3]

    assert norm(DENSE, {"w": np.array([[13], [5]], np.float32)}, sliced, base) == 5.0  # from 10 and 1
    assert norm(DENSE, {"values": values}, single, base) == 5.0


def signs(groups: dict[str, int], *names: str) -> Section:
    return Section(names, CodeEncoding(1, SIGNS), groups)


def test_norm_of_one_bit_needs_scales_and_counts_only() -> None:
    form = Form(
        "s", 1, (signs({"b": 0, "w": 1}, "b", "w"), Section(("n.running_var",), FloatEncoding())), change=True
    )
    arrays: Arrays = {
        "codes": np.array([0x03, 0xFF, 0x0A], np.uint8),
        "scales": np.array([3, 2], np.float32),
        "values": np.array([1e6, 1e6], np.float32),
    }

    assert norm(form, arrays, WHOLE, {}) == pytest.approx(math.sqrt(9 * 4 + 4 * 12), rel=1e-15)


def test_norm_of_one_bit_entries_takes_each_tensors_scale() -> None:
    form = Form("s", 1, (signs({"b": 0, "w": 1, "n.running_var": 2}, "values"),), change=True)
    regions: dict[str, Region] = {
        "values": EntryRegion(("b", "w", "n.running_var"), np.array([0, 3, 4, 6, 17]))
    }
    arrays: Arrays = {"codes": np.array([9], np.uint8), "scales": np.array([3, 2, 1e6], np.float32)}

    assert norm(form, arrays, regions, {}) == pytest.approx(math.sqrt(9 * 2 + 4 * 2), rel=1e-15)


def test_norm_of_other_changes_is_that_of_what_they_decode_to() -> None:
    form = Form(
        "m",
        1,
        (
            Section(("b",), CodeEncoding(2, (0.0, 1.0, -1.0, 2.0)), {"b": 0}),
            Section(("w",), SparseEncoding(0.1)),
            Section(("n.running_var",), FloatEncoding("float16")),
        ),
        change=True,
    )
    arrays: Arrays = {
        "codes": np.array([0b11_10_01_00], np.uint8),
        "scales": np.array([2], np.float32),
        "values": np.array([3, -4], np.float32),
        "halves": np.array([6e4, 6e4], np.float16),
        "mask": np.array([0b11, 0], np.uint8),
    }

    assert norm(form, arrays, WHOLE, {}) == pytest.approx(math.sqrt(4 + 4 + 16 + 9 + 16), rel=1e-15)


def test_norm_of_coded_weights_is_that_of_their_difference() -> None:
    form = Form("binary", 1, (signs({"b": 0}, "b"),))

    found = norm(form, {"codes": np.array([0b0011], np.uint8), "scales": np.ones(1, np.float32)}, {"b": None})

    assert found == pytest.approx(math.sqrt(2 * 1 + 2 * 9))  # plus and minus one, from two
