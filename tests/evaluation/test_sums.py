"""Reports of an evaluation round: exact sums, what is refused, and what is shown of whom."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.wire.bundle.graphs import Graph, Port
from edgefl.wire.metrics import REPORT_LIMIT
from edgefl.wire.tensors import Array
from edgefl_server.aggregate.integer_sums import DeviceSums, ReportCollector, SumBlocks
from edgefl_server.device_evaluation import SCALE, add_reports, flat_evaluation, summarize
from tests.device_runtime import tiny
from tests.server.fleet import bundle
from tests.support.errors import UpdateRejected, refuses


def pieces() -> SumBlocks:
    manifest = bundle("strong").manifest
    ports = tuple(
        Port(name=f"update.{name}", role="update", dtype="int64", shape=())
        for name in ("loss_sum", "correct", "count")
    )
    graph: Graph = tiny.graph_of("g", b"", (), ports)
    return SumBlocks.of(msgspec.structs.replace(manifest, graphs=(graph,)))


def report(tier: str, loss: float, correct: int, count: int) -> DeviceSums:
    values = {"loss_sum": loss, "correct": correct, "count": count}
    arrays = {name: np.array(round(value * SCALE), np.int64) for name, value in values.items()}
    return DeviceSums.check(arrays, pieces(), tier, rows=count)


def test_sums_are_exact_in_any_order_and_over_workers() -> None:
    reports = [report("strong", 1 / 3 + number, number, 10 + number) for number in range(7)]
    whole, part = ReportCollector(), ReportCollector()
    for each in reports[:3]:
        whole.add(each, 1)
    for each in reports[3:]:
        part.add(each, 5, 0.5)
    partial = part.partial()
    assert partial is not None
    whole.take(partial)
    expected = {
        name: sum(int(each.named[name]) for each in reports) for name in ("loss_sum", "correct", "count")
    }
    assert {name: int(total) for name, total in add_reports(whole.reports).items()} == expected
    assert add_reports(reversed(whole.reports)) == add_reports(reports)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"correct": None}, "wrong-names"),
        ({"more": np.array(0, np.int64)}, "wrong-names"),
        ({"count": np.array(1.0, np.float32)}, "wrong-dtype"),
        ({"count": np.array([1, 2], np.int64)}, "wrong-shape"),
        ({"loss_sum": np.array(REPORT_LIMIT, np.int64)}, "not-finite"),
        ({"loss_sum": np.array(np.iinfo(np.int64).min, np.int64)}, "not-finite"),
        ({"correct": np.array(11 << 16, np.int64)}, "wrong-sums"),
        ({"correct": np.array(-1, np.int64)}, "wrong-sums"),
        ({"count": np.array(-(1 << 16), np.int64)}, "wrong-sums"),
    ],
)
def test_a_report_that_cannot_be_is_refused(changes: dict[str, Array | None], code: str) -> None:
    honest: dict[str, Any] = report("strong", 2.0, 4, 10).named
    sent = {name: array for name, array in {**honest, **changes}.items() if array is not None}
    with refuses(UpdateRejected, reason=code):
        DeviceSums.check(sent, pieces(), "strong", rows=10)


def test_a_report_of_more_labels_than_the_device_has_is_refused() -> None:
    sent = report("strong", 2.0, 4, 10).named
    assert DeviceSums.check(sent, pieces(), "strong", rows=10).named == sent
    with refuses(UpdateRejected, reason="wrong-sums"):
        DeviceSums.check(sent, pieces(), "strong", rows=9)


def test_results_by_tier_and_over_devices() -> None:
    reports = [report("strong", 5.0, 5 + number // 2, 10) for number in range(10)]
    reports += [report("weak", 30.0, 1, 20), report("weak", 10.0, 9, 10), report("weak", 5.0, 2, 10)]
    found = summarize(reports, ("accuracy", "loss"), trained_rounds=4, least_group=3)
    assert found.devices is not None and found.devices.devices == 13
    correct = sum(5 + number // 2 for number in range(10)) + 12
    assert found.devices.metrics["accuracy"] == pytest.approx(correct / 140)
    assert found.devices.metrics["loss"] == pytest.approx((50 + 45) / 140)
    own = [*(0.5 + number // 2 / 10 for number in range(10)), 0.05, 0.9, 0.2]
    assert found.devices.median["accuracy"] == pytest.approx(np.median(own))
    assert found.devices.worst_decile["accuracy"] == pytest.approx(np.quantile(own, 0.1))
    assert found.devices.worst_decile["loss"] == pytest.approx(np.quantile([0.5] * 10 + [1.5, 1.0, 0.5], 0.9))
    assert sum(found.devices.histogram) == 13 and found.devices.histogram[0] == 1
    assert found.tiers.keys() == {"strong", "weak"} and found.left_out == ()
    assert found.sums["count"] == 140 << 16
    assert flat_evaluation(found)["tier.strong.accuracy"] == found.tiers["strong"].metrics["accuracy"]


def test_a_small_tier_is_not_shown_by_a_difference() -> None:
    reports = [report("strong", 5.0, 5, 10) for _ in range(6)] + [report("weak", 30.0, 1, 20)]
    found = summarize(reports, ("accuracy",), trained_rounds=4, least_group=3)
    assert found.devices == found.tiers["strong"] and found.left_out == ("weak",)
    assert found.sums["count"] == 60 << 16
    several = [report(f"small-{number}", 5.0, 5, 10) for number in range(3)]
    found = summarize(reports[:6] + several, ("accuracy",), trained_rounds=4, least_group=3)
    assert found.devices is not None and found.devices.devices == 9, "three hidden devices are a group"


def test_thousands_of_large_reports_do_not_overflow() -> None:
    large = report("strong", 2.0**35, 1, 1)
    assert int(add_reports([large] * 5000)["loss_sum"]) == 5000 * 2**51


def test_sums_of_tokens_and_pixels_may_exceed_the_rows() -> None:
    shapes = {"tokens": (), "nll": (), "count": (), "tp": (4,)}
    ports = tuple(Port(name=f"update.{n}", role="update", dtype="int64", shape=s) for n, s in shapes.items())
    manifest = msgspec.structs.replace(
        bundle("strong").manifest, graphs=(tiny.graph_of("g", b"", (), ports),)
    )
    blocks = SumBlocks.of(manifest)
    values = {"tokens": 60, "nll": 100, "count": 10, "tp": [10, 20, 5, 5]}
    sent = {name: np.array(value, np.int64) << 16 for name, value in values.items()}
    assert DeviceSums.check(sent, blocks, "strong", rows=10, labels=6).named.keys() == sent.keys()
    for name, wrong in (("tokens", 61), ("nll", -1), ("count", 11), ("tp", [61, 0, 0, 0])):
        with pytest.raises(UpdateRejected) as caught:
            DeviceSums.check(
                {**sent, name: np.array(wrong, np.int64) << 16}, blocks, "strong", rows=10, labels=6
            )
        assert caught.value.reason == "wrong-sums", name


def test_a_group_below_the_least_is_not_shown() -> None:
    found = summarize([report("weak", 1.0, 1, 2)], ("accuracy",), trained_rounds=1, least_group=2)
    assert (found.devices, found.tiers, found.sums, found.left_out) == (None, {}, {}, ("weak",))


def test_a_device_without_a_label_that_counts_has_no_metric() -> None:
    found = summarize(
        [report("weak", 0.0, 0, 0), report("weak", 1.0, 1, 2)], ("accuracy",), trained_rounds=1, least_group=1
    )
    assert found.devices is not None
    assert found.devices.median == {"accuracy": 0.5, "loss": 0.5}
