"""Moving statistics cannot pass a clip: what an update may say of them, and that no variance is ever below 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.limits import Limits
from edgefl.wire.regions import BlockRegion, EntryRegion, Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE, VALUE_LIMIT, CodeEncoding, FloatEncoding, Form, Section
from edgefl_server.aggregate.aggregator import Aggregator, NormClip, layout_of
from edgefl_server.aggregate.robust import RobustRule
from edgefl_server.aggregate.statistics import bounds_of
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.publish.model import ModelVersion
from edgefl_server.rounds import FixedDownlink, RoundModel, begin_aggregation
from edgefl_server.run_spec import AggregateSpec
from tests.server.fleet import plan_for

OLD: Arrays = {
    "bn.running_mean": np.array([0.5, -6, 0, 1], np.float32),
    "bn.running_var": np.array([1, 4, 9, 2], np.float32),
    "count": np.array(10, np.float32),
    "w": np.arange(6, dtype=np.float32),
}
STATISTICS = ["bn.running_mean", "bn.running_var", "count"]
WHOLE: dict[str, Region] = dict.fromkeys(OLD)
PLAIN = Form(
    "floats",
    sections=(Section(("w",), FloatEncoding()), Section(tuple(STATISTICS), FloatEncoding())),
    change=True,
)
CHANGES = Form(change=True)


def aggregator(reach: float, count: int = 1, **more: object) -> Aggregator:
    bounds = bounds_of(OLD, STATISTICS, reach)
    return Aggregator(layout_of(OLD), weight_limit=count, device="cpu", statistics=bounds, **more)  # type: ignore[arg-type]


def after(sums: Aggregator, *updates: Arrays, form: Form = DENSE) -> Arrays:
    for update in updates:
        sums.add(sums.check(update, WHOLE, form), 1)
    return sums.result(OLD)


POISON: Arrays = {
    **OLD,
    "bn.running_mean": np.full(4, -VALUE_LIMIT, np.float32),
    "bn.running_var": np.full(4, -VALUE_LIMIT, np.float32),
    "count": np.array(VALUE_LIMIT, np.float32),
}


@pytest.mark.parametrize("rule", [RobustRule(), RobustRule("median"), RobustRule("multi_krum", 0.34)])
def test_statistics_that_no_norm_counts_move_as_far_as_their_own_bound(rule: RobustRule) -> None:
    """The recipe of the review: under a clip, -2**20 as a variance had norm 0 and went into the sum as it was."""
    sums = aggregator(1.0, rule=rule, clip=NormClip(1.0, OLD, frozenset(STATISTICS)))

    new = after(sums, POISON)

    assert new["bn.running_var"].tolist() == [0.0] * 4
    mean = OLD["bn.running_mean"] - np.maximum(np.abs(OLD["bn.running_mean"]), 2)  # the mean variance is 4
    np.testing.assert_allclose(new["bn.running_mean"], mean)
    assert new["count"] == 20 and new["w"].tobytes() == OLD["w"].tobytes()


def test_a_variance_may_grow_by_so_many_of_itself_or_of_its_layers() -> None:
    new = after(aggregator(3.0), OLD | {"bn.running_var": np.full(4, VALUE_LIMIT, np.float32)})
    assert new["bn.running_var"].tolist() == [1 + 3 * 4, 4 + 3 * 4, 9 + 3 * 9, 2 + 3 * 4]


@pytest.mark.parametrize("reach", [0.0, 3.0])
def test_no_round_leaves_a_variance_below_zero(reach: float) -> None:
    changes = {name: np.full(array.shape, -1e3, np.float32) for name, array in OLD.items()}
    sent = {"values": np.full(sum(array.size for array in OLD.values()), -1e3, np.float32)}
    for arrays, form in ((POISON, DENSE), (sent, PLAIN), (changes, CHANGES)):
        new = after(aggregator(reach), arrays, form=form)
        assert (new["bn.running_var"] == 0).all() and not np.signbit(new["bn.running_var"]).any()


def test_one_bad_device_of_many_moves_them_as_far_as_its_share() -> None:
    new = after(aggregator(3.0, count=10), *[OLD] * 9, OLD | {"bn.running_var": POISON["bn.running_var"]})
    np.testing.assert_allclose(new["bn.running_var"], 0.9 * OLD["bn.running_var"], rtol=1e-6)


def test_updates_within_their_bounds_are_added_as_they_came() -> None:
    near = {name: array + np.float32(0.25) for name, array in OLD.items()}
    sums, plain = aggregator(3.0), Aggregator(layout_of(OLD), weight_limit=1, device="cpu")
    checked = sums.check(near, WHOLE)

    assert sums._clamp_statistics(checked, sums._statistics) is checked  # type: ignore[arg-type]
    for name, array in after(plain, near).items():
        assert array.tobytes() == after(aggregator(3.0), near)[name].tobytes()


def test_coded_statistics_are_bounded() -> None:
    coded = Section(("bn.running_mean", "bn.running_var", "count"), CodeEncoding(2, (0.0, 1.0, -1.0, 2.0)), {
        "bn.running_mean": 0, "bn.running_var": 1, "count": 2,
    })  # fmt: skip
    form = Form("m", 1, (Section(("w",), FloatEncoding()), coded), change=True)
    arrays: Arrays = {
        "values": np.full(6, 0.5, np.float32),
        "codes": np.array([0b00000000, 0b10_10_10_10, 0b01], np.uint8),
        "scales": np.array([1, 900, 900], np.float32),
    }

    new = after(aggregator(1.0), arrays, form=form)

    assert new["bn.running_var"].tolist() == [0.0] * 4 and new["count"] == 20
    assert new["w"].tolist() == (OLD["w"] + 0.5).tolist()
    assert new["bn.running_mean"].tobytes() == OLD["bn.running_mean"].tobytes()


def test_a_slice_and_single_entries_are_bounded_where_they_lie() -> None:
    sliced: dict[str, Region] = {"bn.running_var": BlockRegion(((3, 1),)), "w": None}
    single: dict[str, Region] = {"values": EntryRegion(("w", "bn.running_var"), np.array([0, 5, 7, 8]))}
    bad = np.full(2, -900, np.float32)
    for regions, arrays in (
        (sliced, {"bn.running_var": bad, "w": OLD["w"]}),
        (single, {"values": np.concatenate([OLD["w"][[0, 5]], bad])}),
    ):
        sums = aggregator(3.0)
        sums.add(sums.check(arrays, regions), 1)
        new = sums.result(OLD)
        zero = [3, 1] if regions is sliced else [1, 2]
        assert [at for at in range(4) if new["bn.running_var"][at] == 0] == sorted(zero)
        assert new["w"].tobytes() == OLD["w"].tobytes()


@given(
    values=st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=9, max_size=9),
    reach=st.sampled_from([0.5, 1.0, 3.0]),
    change=st.booleans(),
)
def test_whatever_is_sent_stays_within_reach(values: list[float], reach: float, change: bool) -> None:
    sent = np.array(values, np.float32) / (2.0**8 if change else 1.0)
    update = {
        **(OLD if not change else {"w": np.zeros(6, np.float32)}),
        "bn.running_mean": sent[:4].astype(np.float32),
        "bn.running_var": sent[4:8].astype(np.float32),
        "count": sent[8:].reshape(()).astype(np.float32),
    }
    bounds = bounds_of(OLD, STATISTICS, reach)

    new = after(aggregator(reach), update, form=CHANGES if change else DENSE)

    for name in STATISTICS:
        flat = new[name].reshape(-1)
        slack = 1e-6 * (1 + np.abs(OLD[name]).max() + np.abs(bounds.high[name]))
        assert (bounds.low[name] - slack <= flat).all() and (flat <= bounds.high[name] + slack).all()
    assert (new["bn.running_var"] >= 0).all()


def test_statistics_that_are_nothing_yet_may_become_something() -> None:
    nothing = {"bn.running_mean": np.zeros(2, np.float32), "bn.running_var": np.zeros(2, np.float32)}
    bounds = bounds_of(nothing, nothing, 2.0)
    assert bounds.high["bn.running_mean"].tolist() == bounds.high["bn.running_var"].tolist() == [2.0, 2.0]
    assert bounds_of({"c": np.zeros(0, np.float32)}, ["c"], 2.0).high["c"].size == 0


def robust(*updates: Arrays, form: Form = DENSE, regions: dict[str, Region] = WHOLE) -> Aggregator:
    bounds = bounds_of(OLD, STATISTICS, 3.0, median=True)
    sums = Aggregator(layout_of(OLD), weight_limit=9, device="cpu", statistics=bounds)
    for update in updates:
        sums.add(sums.check(update, regions, form), 1)
    return sums


def test_where_bad_updates_are_looked_for_statistics_become_their_median() -> None:
    """Within their bound, two of ten pull each mean of a layer by 0.6 deviations a round, and the model is lost."""
    honest = [
        {name: array + np.float32(step) / 4 for name, array in OLD.items()} for step in (-1, 0, 0, 1, 2)
    ]

    new = robust(*honest, POISON, POISON).result(OLD)

    for name in STATISTICS:
        low, high = (OLD[name] + np.float32(step) / 4 for step in (-1, 2))
        assert ((low <= new[name]) & (new[name] <= high)).all()
    # What is trained is a mean as before.
    np.testing.assert_allclose(new["w"], OLD["w"] + 2 / 4 / 7, rtol=1e-6)


def test_medians_of_changes_are_added_and_what_nobody_holds_stays() -> None:
    sliced: dict[str, Region] = {"bn.running_var": BlockRegion(((3, 1),))}
    changes = [{"bn.running_var": np.array([step, 2], np.float32)} for step in (1, -1, 1)]

    new = robust(*changes, form=CHANGES, regions=sliced).result(OLD)

    assert new["bn.running_var"].tolist() == [1, 6, 9, 3] and new["count"] == 10
    assert new["bn.running_mean"].tobytes() == OLD["bn.running_mean"].tobytes()


def test_shares_of_a_round_have_one_median() -> None:
    updates = [{name: array + np.float32(step) for name, array in OLD.items()} for step in (0, 1, 2, 0.5)]
    whole, first = robust(*updates), robust(*updates[:1])
    partial = robust(*updates[1:]).partial()
    assert partial is not None
    first.take(partial)
    one, other = whole.result(OLD), first.result(OLD)
    assert all(one[name].tobytes() == other[name].tobytes() for name in OLD)


@pytest.mark.parametrize(
    ("spec", "median"),
    [
        (AggregateSpec(), False),
        (AggregateSpec(clip_norm=1.0), True),
        (AggregateSpec(RobustRule("multi_krum", 0.3)), True),
        (AggregateSpec(RobustRule("median")), False),  # of everything, statistics too
    ],
)
def test_a_round_bounds_its_statistics(spec: AggregateSpec, median: bool) -> None:
    weights = ("stem.weight", "body.weight", "head.weight")
    plan = replace(plan_for("bounded", Limits()), trained=frozenset(weights), aggregate=spec)
    tasks = Assignments({"strong-0": Assignment("strong-0", "strong", 0, "n")})
    opened = OpenRound(1, "v", 0.0, 9.0, 1, tasks)
    model = RoundModel(ModelVersion.of(plan, 0, plan.initial), FixedDownlink(plan.initial))

    active = begin_aggregation(plan, opened, model, device="cpu", sums=None)

    bounds = active.aggregator._statistics
    assert bounds is not None and bounds.names == {"body.bias"} and bounds.median == median
