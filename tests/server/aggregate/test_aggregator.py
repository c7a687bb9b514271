"""The aggregator: exact, independent of order, partial, and closed to bad updates."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.regions import BlockRegion, Region, extract, pieces
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import (
    CHANGE_LIMIT,
    SIGNS,
    VALUE_LIMIT,
    CodeEncoding,
    FloatEncoding,
    Form,
    Section,
)
from edgefl_server.aggregate.accumulator import Accumulator, CpuAccumulator
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.aggregate.cuda import TorchAccumulator
from edgefl_server.aggregate.robust import RobustRule, buffered_bytes
from edgefl_server.coordinator.states import Rules
from tests.server.aggregate.small_model import OLD, SINGLES, SLICE, SUFFIX, WHOLE, drawn
from tests.support.errors import ConfigError, UpdateRejected, refuses


def aggregate(
    updates: list[tuple[Arrays, dict[str, Region], int]], limit: int = 0, base: Arrays | None = None
) -> Arrays:
    total = limit or sum(weight for _, _, weight in updates)
    aggregator = Aggregator(layout_of(OLD), weight_limit=total, device="cpu", base=base)
    for arrays, regions, weight in updates:
        aggregator.add(aggregator.check(arrays, regions), weight)
    return aggregator.result(OLD)


def by_hand(updates: list[tuple[Arrays, dict[str, Region], int]], *, nonzero: bool = False) -> Arrays:
    totals = {name: np.zeros(old.size) for name, old in OLD.items()}
    weights = {name: np.zeros(old.size) for name, old in OLD.items()}
    shapes = {name: old.shape for name, old in OLD.items()}
    for arrays, regions, weight in updates:
        for name, region in regions.items():
            left = arrays[name].astype(np.float64).reshape(-1).tolist()
            for part, positions in pieces(name, region, shapes):
                for place in range(OLD[part].size) if positions is None else positions:
                    value = left.pop(0)
                    if nonzero and value == OLD[part].reshape(-1)[place]:
                        continue
                    totals[part][place] += weight * value
                    weights[part][place] += weight
    return {name: _mean(totals[name], weights[name], old) for name, old in OLD.items()}


def _mean(total: Array, weights: Array, old: Array) -> Array:
    mean = np.divide(total, weights, out=np.zeros(old.size), where=weights > 0).astype(np.float32)
    return np.where(weights.reshape(old.shape) > 0, mean.reshape(old.shape), old)


CHOICES = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(1, 70_000), st.integers(0, 2**32)),
    min_size=1,
    max_size=9,
)


def realised(choices: list[tuple[int, int, int]]) -> list[tuple[Arrays, dict[str, Region], int]]:
    kinds = (WHOLE, SUFFIX, SLICE, SINGLES)
    return [(drawn(np.random.default_rng(seed), kinds[kind]), kinds[kind], w) for kind, w, seed in choices]


@pytest.mark.parametrize("how", ["holders", "changed", "median"])
@given(CHOICES, st.integers(1, 4))
def test_partial_sums_merge(how: str, choices: list[tuple[int, int, int]], shares: int) -> None:
    updates = realised(choices)

    def begun() -> Aggregator:
        return Aggregator(
            layout_of(OLD),
            weight_limit=sum(weight for _, _, weight in updates),
            device="cpu",
            base=OLD if how == "changed" else None,
            rule=RobustRule("median" if how == "median" else "mean"),
        )

    whole, merged = begun(), begun()
    for arrays, regions, weight in updates:
        whole.add(whole.check(arrays, regions), weight)
    for first in reversed(range(shares)):
        share = begun()
        for arrays, regions, weight in updates[first::shares]:
            share.add(share.check(arrays, regions), weight)
        if (partial := share.partial()) is not None:
            merged.take(partial)

    one, other = whole.result(OLD), merged.result(OLD)
    assert all(one[name].tobytes() == other[name].tobytes() for name in OLD)
    assert merged.total_weight == whole.total_weight


@given(CHOICES)
def test_entries_are_weighted_means_over_their_holders(choices: list[tuple[int, int, int]]) -> None:
    updates = realised(choices)
    found, expected = aggregate(updates), by_hand(updates)
    for name in OLD:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, rtol=2e-7)
        assert found[name].dtype == np.float32 and found[name].shape == OLD[name].shape


@given(CHOICES, st.randoms(use_true_random=False))
def test_with_a_base_only_changes_count(choices: list[tuple[int, int, int]], random: object) -> None:
    updates = []
    for number, (arrays, regions, weight) in enumerate(realised(choices)):
        same = np.random.default_rng(number)
        held = extract(OLD, regions)
        mixed = {n: np.where(same.random(a.shape) < 0.5, held[n], a) for n, a in arrays.items()}
        updates.append((mixed, regions, weight))
    shuffled = list(updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found, expected = aggregate(updates, base=OLD), by_hand(updates, nonzero=True)
    other = aggregate(shuffled, base=OLD)
    for name in OLD:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, rtol=2e-7)
        assert found[name].tobytes() == other[name].tobytes()


def test_with_a_base_an_entry_that_nobody_changed_keeps_its_bits() -> None:
    zeros = {**OLD, "b.bias": OLD["b.bias"] * np.float32(1)}
    new = aggregate([(zeros, WHOLE, 3), (extract(OLD, SINGLES), SINGLES, 1)], base=OLD)
    assert all(new[name].tobytes() == OLD[name].tobytes() for name in OLD)
    counted = aggregate([(zeros, WHOLE, 3)])
    assert counted["b.bias"][1] != OLD["b.bias"][1], "averaged, the smallest value is rounded"


def test_an_entry_that_nobody_held_keeps_its_bits() -> None:
    new = aggregate([(drawn(np.random.default_rng(0), SUFFIX), SUFFIX, 1)])
    assert new["a.weight"].tobytes() == OLD["a.weight"].tobytes()
    assert not np.array_equal(new["b.bias"], OLD["b.bias"])


def test_the_largest_values_and_weights_do_not_overflow() -> None:
    high = {name: np.full(array.shape, VALUE_LIMIT, np.float32) for name, array in OLD.items()}
    low = {name: -array for name, array in high.items()}
    for arrays, expected in ((high, VALUE_LIMIT), (low, -VALUE_LIMIT)):
        new = aggregate([(arrays, WHOLE, 1 << 24)] * 64)
        assert all(np.array_equal(new[name], np.full(OLD[name].shape, expected)) for name in OLD)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_changes_and_weights_do_not_overflow(sign: float) -> None:
    form = Form("floats", sections=(Section(tuple(OLD), FloatEncoding()),), change=True)
    aggregator = Aggregator(layout_of(OLD), weight_limit=64 << 24, device="cpu")
    update = {"values": np.full(28, sign * CHANGE_LIMIT, np.float32)}
    for _ in range(64):
        aggregator.add(aggregator.check(update, WHOLE, form), 1 << 24)
    zeros = {name: np.zeros_like(array) for name, array in OLD.items()}
    assert all((new == sign * CHANGE_LIMIT).all() for new in aggregator.result(zeros).values())
    with pytest.raises(UpdateRejected, match="beyond 4096, the most that a change may be") as refused:
        aggregator.check({"values": update["values"] * np.float32(1.01)}, WHOLE, form)
    assert refused.value.reason == "too-large"


def test_small_changes_survive_the_largest_claims() -> None:
    form = Form("signs", sections=(Section(("w",), CodeEncoding(1, SIGNS), {"w": 0}),), change=True)
    weights = {"w": np.zeros(64, np.float32)}
    limit = 990 * Rules("run", 0, 1, ()).most_samples + 10 * 100
    aggregator = Aggregator(layout_of(weights), weight_limit=limit, device="cpu")
    update = {"codes": np.full(8, 0b00001111, np.uint8), "scales": np.array([1e-5], np.float32)}
    regions: dict[str, Region] = {"w": None}
    for _ in range(10):
        aggregator.add(aggregator.check(update, regions, form), 100)
    expected = np.tile(np.repeat([1e-5, -1e-5], 4), 8)
    np.testing.assert_allclose(aggregator.result(weights)["w"], expected, rtol=0.01)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e30, float("nan"), float("inf"), 1e39])
def test_a_known_scale_out_of_range_is_refused(scale: float) -> None:
    form = Form("signs", sections=(Section(tuple(OLD), CodeEncoding(1, SIGNS, scale)),), change=True)
    with refuses(ConfigError, codec="signs", largest=...):
        Aggregator(layout_of(OLD), weight_limit=1, device="cpu").pieces(WHOLE, form)


def test_an_aggregator_that_gave_its_sums_away_is_of_no_more_use() -> None:
    aggregator = Aggregator(layout_of(OLD), weight_limit=2, device="cpu")
    checked = aggregator.check(drawn(np.random.default_rng(0), WHOLE), WHOLE)
    aggregator.add(checked, 1)
    assert aggregator.release_sums() is not None
    for call in (lambda: aggregator.add(checked, 1), lambda: aggregator.result(OLD), aggregator.release_sums):
        with pytest.raises(RuntimeError, match="make a new one"):
            call()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_buffered_rule_takes_no_more_memory_than_it_says(threads: int) -> None:
    updates, entries = 100, 2 * 66_000
    weights = {name: np.zeros(entries // 2, np.float32) for name in ("a", "b")}
    aggregator = Aggregator(
        layout_of(weights), weight_limit=updates, device="cpu", threads=threads, rule=RobustRule("median")
    )
    regions: dict[str, Region] = dict.fromkeys(weights)
    checked = aggregator.check(weights, regions)
    tracemalloc.start()
    for _ in range(updates):
        aggregator.add(checked, 1)
    aggregator.result(weights)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stated = buffered_bytes(updates, entries, threads)
    assert stated / 2 < peak <= stated


def test_small_weights_under_a_large_limit_stay_accurate() -> None:
    updates = [(drawn(np.random.default_rng(n), WHOLE), WHOLE, 3) for n in range(16)]
    found, expected = aggregate(updates, limit=16 * 60_000), by_hand(updates)
    assert max(np.abs(found[name] - expected[name]).max() for name in OLD) < 1e-6


def bad(name: str, array: np.ndarray | None) -> Arrays:
    arrays = drawn(np.random.default_rng(1), WHOLE)
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array
    return arrays


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (bad("b.bias", None), "wrong-names"),
        (bad("c.more", np.zeros(1, np.float32)), "wrong-names"),
        (bad("b.bias", np.zeros(4, np.float32)), "wrong-shape"),
        (bad("b.bias", np.zeros((3, 1), np.float32)), "wrong-shape"),
        (bad("b.bias", np.zeros(3, np.int64)), "wrong-dtype"),
        (bad("b.bias", np.zeros(3, np.float64)), "wrong-dtype"),
        (bad("b.bias", np.zeros(3, ">f4")), "wrong-dtype"),
        (bad("b.bias", np.array([0, np.nan, 0], np.float32)), "not-finite"),
        (bad("b.bias", np.array([0, np.inf, 0], np.float32)), "not-finite"),
        (bad("b.bias", np.array([0, -np.inf, 0], np.float32)), "not-finite"),
        (bad("b.bias", np.array([0, -VALUE_LIMIT * 1.01, 0], np.float32)), "too-large"),
    ],
)
def test_a_bad_update_is_refused_with_a_reason(arrays: Arrays, reason: str) -> None:
    aggregator = Aggregator(layout_of(OLD), weight_limit=1, device="cpu")
    with refuses(UpdateRejected, reason=reason):
        aggregator.check(arrays, WHOLE)


def test_both_engines_give_the_same_model_twice() -> None:
    form = Form("signs", sections=(Section(tuple(OLD), CodeEncoding(1, SIGNS, 0.3)),), change=True)
    arrays = {"codes": np.array([7, 0, 255, 5, 1], np.uint8)}
    found = []
    for engine in (CpuAccumulator(28), TorchAccumulator(28, torch.device("cpu"))):
        sums: Accumulator | None = engine
        for _ in range(2):
            aggregator = Aggregator(layout_of(OLD), weight_limit=3, device="cpu", sums=sums)
            checked = aggregator.check(arrays, WHOLE, form)
            aggregator.add(checked, 3)
            found.append(aggregator.result(OLD))
            engine.add(checked.pieces, [checked], np.array([2.0**40]))
            assert engine.sums().any(), "they are emptied when they are used again"
            sums = aggregator.release_sums()
        assert sums is engine
        with pytest.raises(ValueError, match="28"):
            Aggregator(layout_of({"w": np.zeros(3, np.float32)}), weight_limit=1, sums=engine)
    for name in OLD:
        assert not np.array_equal(found[0][name], OLD[name])
        assert len({new[name].tobytes() for new in found}) == 1


def test_slices_that_cut_many_pieces_are_added_by_index() -> None:
    weights = {"w": np.zeros((3000, 4), np.float32)}
    regions: dict[str, Region] = {"w": BlockRegion((None, range(1, 3)))}
    aggregator = Aggregator(layout_of(weights), weight_limit=2, device="cpu")
    ones = {"w": np.ones((3000, 2), np.float32)}
    assert aggregator.pieces(regions).index.size == 6000
    assert np.array_equal(aggregator.pieces(regions).targets(), regions["w"].positions((3000, 4)))
    aggregator.add(aggregator.check(ones, regions), 2)
    new = aggregator.result(weights)["w"]
    assert (new[:, 1:3] == 1).all() and (new[:, [0, 3]] == 0).all()


def test_models_of_other_float_types_are_averaged_in_their_own() -> None:
    for dtype in (np.float64, np.float16):
        old = {"w": np.array([1.5, -2.0], dtype)}
        aggregator = Aggregator(layout_of(old), weight_limit=2, device="cpu")
        for value in (1.0, 2.0):
            aggregator.add(aggregator.check({"w": np.full(2, value, np.float32)}, {"w": None}), 1)
        new = aggregator.result(old)["w"]
        assert new.dtype == dtype and new.tolist() == [1.5, 1.5]
