"""The sums at their edges: bits of the fixed point, weights at the limit, batches that are just full, messages."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.wire.bits import packed_bytes
from edgefl.wire.regions import Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import (
    CHANGE_LIMIT,
    SIGNS,
    CodeEncoding,
    FloatEncoding,
    Form,
    Section,
    SparseEncoding,
)
from edgefl_server.aggregate.accumulator import CpuAccumulator
from edgefl_server.aggregate.aggregator import Aggregator, NormClip, accumulator, layout_of
from edgefl_server.aggregate.averaging import HolderMean
from edgefl_server.aggregate.robust import RobustRule
from edgefl_server.aggregate.scatter import PART, compile_pieces, flatten
from tests.support.errors import UpdateRejected, refuses

OLD: Arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
WHOLE: dict[str, Region] = dict.fromkeys(OLD)
CHANGES = Form("floats", sections=(Section(("a", "b"), FloatEncoding()),), change=True)


def aggregator(limit: int = 4, **more: object) -> Aggregator:
    return Aggregator(layout_of(OLD), weight_limit=limit, device="cpu", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "bits"), [(0, 42), (1, 42), (2, 41), (3, 40), (4, 40), (5, 39), (1 << 20, 22)]
)
def test_bits_below_one_are_what_the_largest_sum_of_weights_leaves(limit: int, bits: int) -> None:
    sums = aggregator(limit)
    assert sums.fraction_bits == bits
    sums.add(sums.check({"values": np.zeros(8, np.float32)}, WHOLE, CHANGES), 1)
    assert sums.fraction_bits == bits + 8, "changes are at most 2**12, weights 2**20"


def test_weights_add_up_to_the_limit_and_none_is_below_one() -> None:
    sums = aggregator(4)
    checked = sums.check(OLD, WHOLE)
    for weight in (0, -1, 5):
        with pytest.raises(ValueError, match=f"weight {weight} after 0 passes the limit 4"):
            sums.add(checked, weight)
    sums.add(checked, 3)
    with pytest.raises(ValueError, match="weight 2 after 3"):
        sums.add(checked, 2)
    sums.add(checked, 1)
    assert sums.total_weight == 4
    assert all(np.array_equal(new, OLD[name]) for name, new in sums.result(OLD).items())


def test_a_round_without_updates_gives_copies() -> None:
    new = aggregator().result(OLD)
    new["a"][:] = -1
    assert OLD["a"][0, 1] == 1


def test_a_tier_is_compiled_once_for_each_form() -> None:
    sums = aggregator()
    assert sums.pieces(WHOLE) is sums.pieces(WHOLE)
    assert sums.pieces(WHOLE, CHANGES) is not sums.pieces(WHOLE)
    assert sums.pieces(dict(WHOLE)) is not sums.pieces(WHOLE)


def test_small_updates_wait_until_there_are_sixty_four() -> None:
    model = {"w": np.zeros(1000, np.float32), "b": np.zeros(1, np.float32)}
    layout, regions = layout_of(model), {"b": None}
    average = HolderMean(layout, CpuAccumulator(layout.size, 1), 1.0)
    sums = Aggregator(layout, weight_limit=99, device="cpu")
    checked = sums.check({"b": np.ones(1, np.float32)}, regions)
    for _ in range(63):
        average.add(checked, 1, 1.0)
    assert average._waiting_bytes == 63 * 4
    average.add(checked, 1, 1.0)
    assert average._waiting_bytes == 64 * 4
    average.add(checked, 1, 1.0)
    assert average._waiting_bytes == 4 and average._sums.sums()[layout.offsets["b"]] == 64


def test_total_weights_are_one_number_where_they_agree() -> None:
    for regions, weights in ((WHOLE, [5]), ({"b": None}, [0] * 6 + [5] * 2)):
        sums = aggregator(5)
        part = {name: OLD[name] for name in regions}
        for weight in (2, 3):
            sums.add(sums.check(part, regions), weight)
        sums.result(OLD)
        assert sums._average._total_weights().tolist() == weights  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", [RobustRule("median"), RobustRule("trimmed_mean", 0.34)])
def test_a_buffered_rule_adds_changes_and_leaves_what_nobody_holds(rule: RobustRule) -> None:
    form = Form("floats", sections=(Section(("b",), FloatEncoding()),), change=True)
    sums, regions = aggregator(3, rule=rule), {"b": None}
    for value in (1.0, 2.0, 900.0):
        sums.add(sums.check({"values": np.full(2, value, np.float32)}, regions, form), 1)
    new = sums.result(OLD)
    assert new["b"].tolist() == [3.0, 3.0] and new["a"].tobytes() == OLD["a"].tobytes()


def test_a_buffered_rule_clips_changes() -> None:
    sums = aggregator(3, rule=RobustRule("median"), clip=NormClip(1.0, OLD))
    form = Form("floats", sections=(Section(("b",), FloatEncoding()),), change=True)
    sums.add(sums.check({"values": np.array([0, 4], np.float32)}, {"b": None}, form), 3)
    assert sums.result(OLD)["b"].tolist() == [1.0, 2.0]


def test_sums_must_fit_the_model_and_its_rule() -> None:
    with pytest.raises(ValueError, match="counts every holder"):
        aggregator(rule=RobustRule("median"), base=OLD)
    with pytest.raises(ValueError, match="sums of 7 entries cannot take a model of 8"):
        aggregator(sums=CpuAccumulator(7))


def test_sums_are_made_on_the_named_device_with_so_many_threads() -> None:
    made = accumulator(3, "cpu", 77)
    assert isinstance(made, CpuAccumulator) and (made.size, made._threads) == (3, 77)
    assert made.sums().tolist() == [0, 0, 0]


def test_names_that_are_wrong_are_told_three_at_a_time() -> None:
    sums, extra = aggregator(), {f"x{number}": np.zeros(1, np.float32) for number in range(3)}
    with refuses(UpdateRejected, missing=["a"], extra=["x0", "x1", "x2"], reason="wrong-names"):
        sums.check({"b": OLD["b"], **extra}, WHOLE)
    with pytest.raises(UpdateRejected, match=r"missing: none; not asked for: x0, x1, x2 and 1 more;"):
        sums.check({**OLD, **extra, "x3": OLD["b"]}, WHOLE)


@pytest.mark.parametrize(
    ("scale", "reason"), [(0.0, ""), (CHANGE_LIMIT / 2, ""), (CHANGE_LIMIT / 2 + 1, "too-large")]
)
def test_a_scale_times_the_largest_level_may_be_the_limit(scale: float, reason: str) -> None:
    form = Form(
        "x", sections=(Section(("a", "b"), CodeEncoding(1, (-2.0, 2.0)), {"a": 0, "b": 1}),), change=True
    )
    arrays = {"codes": np.zeros(2, np.uint8), "scales": np.array([0, scale], np.float32)}
    sums = aggregator()
    if not reason:
        sums.add(sums.check(arrays, WHOLE, form), 1)
        assert (sums.result(OLD)["b"] == OLD["b"] - 2 * np.float32(scale)).all()
        return
    with refuses(UpdateRejected, reason=reason):
        sums.check(arrays, WHOLE, form)


def test_a_known_scale_may_reach_the_limit() -> None:
    form = Form("x", sections=(Section(("a", "b"), CodeEncoding(1, SIGNS, CHANGE_LIMIT)),), change=True)
    assert compile_pieces(layout_of(OLD), WHOLE, form).size == 8


def test_a_mask_that_fills_its_last_byte_is_taken() -> None:
    form = Form("x", sections=(Section(("a", "b"), SparseEncoding(0.5)),), change=True)
    arrays = {"mask": np.array([0b1000_0111], np.uint8), "values": np.arange(1, 5, dtype=np.float32)}
    sums = aggregator()
    sums.add(sums.check(arrays, WHOLE, form), 1)
    new = sums.result(OLD)
    assert (new["a"] - OLD["a"]).reshape(-1).tolist() == [1, 2, 3, 0, 0, 0]
    assert (new["b"] - OLD["b"]).tolist() == [0, 4]


def test_only_floats_are_laid_out_in_the_order_of_their_names() -> None:
    layout = layout_of({"b": OLD["b"], "a": OLD["a"]})
    assert (layout.offsets, layout.size) == ({"a": 0, "b": 6}, 8)
    assert flatten(layout, OLD).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    with pytest.raises(TypeError, match="n is int64"):
        layout_of({"n": np.zeros(1, np.int64)})


def test_sums_made_a_part_at_a_time_are_those_made_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": PART - 13, "b": 40, "c": PART + 1001, "d": 9}
    old = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    sections = (
        Section(("a", "c"), CodeEncoding(1, SIGNS), {"a": 0, "c": 1}),
        Section(("b",), FloatEncoding()),
        Section(("d",), SparseEncoding(0.5)),
    )
    mixed = Form("mixed", sections=sections, change=True)
    whole: dict[str, Region] = dict.fromkeys(old)
    tail: dict[str, Region] = dict.fromkeys(("c", "d"))
    floats = Form("floats", sections=(Section(("c", "d"), FloatEncoding()),), change=True)
    codes = sum(packed_bytes(sizes[name]) for name in ("a", "c"))

    def result(by_parts: bool, count: int) -> bytes:
        again, sums = np.random.default_rng(1), CpuAccumulator(sum(sizes.values()), 2)
        aggregator = Aggregator(layout_of(old), weight_limit=99, device="cpu", threads=2, sums=sums)
        if not by_parts:
            monkeypatch.setattr(CpuAccumulator, "by_parts", lambda self, pieces: False)
        for number in range(count):
            values, mask = again.normal(size=45).astype(np.float32), np.array([0b00011111, 0], np.uint8)
            update = {
                "codes": again.integers(0, 256, codes, np.uint8),
                "scales": np.ones(2, np.float32),
                "values": values,
                "mask": mask,
            }
            aggregator.add(aggregator.check(update, whole, mixed), number + 1)
            rest = {"values": again.normal(size=sizes["c"] + 9).astype(np.float32)}
            aggregator.add(aggregator.check(rest, tail, floats), 1)
            if number == 0 and count > 1:
                aggregator._average.flush()  # type: ignore[union-attr]
        first, second = aggregator.result(old), aggregator.result(old)
        monkeypatch.undo()
        assert all(first[name].tobytes() == second[name].tobytes() for name in old)
        assert not any(np.array_equal(first[name], old[name]) for name in old)
        return b"".join(first[name].tobytes() for name in old)

    assert result(True, 1) == result(False, 1)
    assert result(True, 3) == result(False, 3)
