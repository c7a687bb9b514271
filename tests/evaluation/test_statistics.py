"""Statistics of a device's data: the same sums as numpy on the same rows, and what a server shows of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch

from edgefl.algorithms.statistics import statistics
from edgefl.contract.tensors import TensorSpec
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SeriesSpec, SoundSpec, TableSpec
from edgefl.wire.statistics import FRACTION_BITS, STATISTICS, StatisticsRequest, ValueGroups, value_of
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import CompileRequest
from edgefl_server.aggregate.integer_sums import DeviceSums, SumBlocks
from edgefl_server.device_statistics import sum_up
from edgefl_server.events import DataStatistics, Normalization
from tests.support.errors import ConfigError, UpdateRejected, refuses

EDGES = (-0.5, 0.0, 0.25, 1.0)
IMAGES = DataSpec(shape=(3, 6, 5), dtype="float32", classes=4, scale=1 / 64, shift=-1.5)
TABLE = DataSpec(
    shape=(3,),
    dtype="float32",
    classes=2,
    reader=TableSpec(
        columns=("age", "income", "rate"), label="y", mean=(40.0, 0.0, 0.0), deviation=(10.0, 2.0, 1.0)
    ),
)
TEXTS = DataSpec(shape=(12,), dtype="int64", classes=30, below=30)
ROWS = 300


def images(seed: int = 0) -> LocalData:
    rng = np.random.default_rng(seed)
    return LocalData(
        rng.integers(0, 256, (ROWS, *IMAGES.shape), np.uint8), rng.integers(0, 4, ROWS), "the test"
    )


def table(seed: int = 0, policy: Any = "refuse") -> LocalData:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(ROWS, 3)) * [1.0, 1e4, 1e-3]).astype(np.float32)
    x[3, 0], x[7, 1], x[8, 1], x[9, 2] = np.nan, np.inf, 2.0**31, -np.nan
    return LocalData(x, rng.integers(0, 2, ROWS), "the test", policy=policy)


def texts(seed: int = 0) -> LocalData:
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 30, (ROWS, 12))
    x[np.arange(12) >= rng.integers(0, 13, ROWS)[:, None]] = 0
    return LocalData(x, np.roll(x, -1, axis=1), "the test")


def compiled(
    data: DataSpec, request: StatisticsRequest, label: tuple[int, ...] = (), format: str = "onnx"
) -> BundleArchive:
    spec = TensorSpec(label, torch.int64, data.classes)
    made = CompileRequest(
        model="",
        tier="all",
        algorithm=statistics(request, data, spec),
        units=(),
        data=data,
        exchange=STATISTICS,
    )
    return Compiler(target_of(format)).compile(made).bundle


def report_of(
    bundle: BundleArchive, local: LocalData, format: Literal["onnx", "executorch"] = "onnx"
) -> Arrays:
    result = train_round(bundle, {}, local, open_engine(format))
    assert result.samples == result.update["rows"] and result.carry == {} and result.metrics == {}
    assert all(array.dtype == np.int64 for array in result.update.values())
    return result.update


def assert_exact(found: Arrays, x: Array, axis: int = 1) -> None:
    """Compare the sums of the values with numpy's of ``x`` (rows, ...) as the model reads it."""
    grouped = np.moveaxis(x.astype(np.float64), axis, 0).reshape(x.shape[axis], -1)
    finite, within = np.isfinite(grouped), np.abs(grouped) <= 2.0**30
    assert found["missing"].tolist() == (~finite).sum(1).tolist()
    assert found["beyond"].tolist() == (finite & ~within).sum(1).tolist()
    assert found["count"].tolist() == within.sum(1).tolist()
    for name, power in (("sum", 1), ("square", 2)):
        exact = [
            Fraction(sum(map(int, np.rint(row[keep] ** power * 2.0**FRACTION_BITS))), 1 << FRACTION_BITS)
            for row, keep in zip(grouped, within, strict=True)
        ]
        assert value_of(found[name]) == exact
    bins = [np.histogram(row[keep], EDGES)[0].tolist() for row, keep in zip(grouped, finite, strict=True)]
    assert found["histogram"][:, 1:-1].tolist() == bins
    assert found["histogram"][:, 0].tolist() == (finite & (grouped < EDGES[0])).sum(1).tolist()
    assert found["histogram"][:, -1].tolist() == (finite & (grouped > EDGES[-1])).sum(1).tolist()


@pytest.mark.parametrize("format", ["onnx", "executorch"])
def test_sums_of_images_are_exact(format: Literal["onnx", "executorch"]) -> None:
    if format == "executorch":
        pytest.importorskip("executorch")
    local = images()
    found = report_of(compiled(IMAGES, StatisticsRequest(edges=EDGES), format=format), local, format)
    x = local.x.astype(np.float32) * np.float32(IMAGES.scale) + np.float32(IMAGES.shift)
    assert_exact(found, x)
    assert found["classes"].tolist() == np.bincount(local.y, minlength=4).tolist()


def test_sums_of_features_leave_out_missing_and_huge_values() -> None:
    bundle = compiled(TABLE, StatisticsRequest(edges=EDGES))
    local = table()
    found = report_of(bundle, local)
    assert_exact(found, local.x)
    assert found["missing"].tolist() == [1, 1, 1] and found["beyond"].tolist() == [0, 1, 0]

    skipping = table(policy="skip")
    kept = report_of(bundle, skipping)
    assert_exact(kept, skipping.x[np.isfinite(skipping.x).all(axis=1)])
    assert kept["rows"] == ROWS - 3 and not kept["missing"].any()


def test_sums_of_texts_count_lengths_and_next_tokens() -> None:
    local = texts()
    found = report_of(compiled(TEXTS, StatisticsRequest(), label=(12,)), local)
    assert sorted(found) == ["classes", "lengths", "rows"]
    filled = local.x != 0
    lengths = np.where(filled.any(1), 12 - filled[:, ::-1].argmax(1), 1)
    assert found["lengths"].tolist() == np.bincount(lengths, minlength=13)[1:].tolist()
    assert found["classes"].tolist() == np.bincount(local.y.ravel(), minlength=30).tolist()


@pytest.mark.parametrize("name", ["classes", "moments", "missing"])
def test_a_statistic_is_asked_for_alone(name: Any) -> None:
    for data, local in ((IMAGES, images()), (TABLE, table())):
        found = report_of(compiled(data, StatisticsRequest(ask=(name,))), local)
        sums = {"moments": {"count", "sum", "square", "beyond"}}.get(name, {name})
        assert found.keys() == sums | {"rows"} and found["rows"] == ROWS
    if name == "classes":
        local = texts()
        found = report_of(compiled(TEXTS, StatisticsRequest(ask=(name,)), label=(12,)), local)
        assert found["classes"].tolist() == np.bincount(local.y.ravel(), minlength=30).tolist()


def summed(data: DataSpec, reports: list[Arrays], bundle: BundleArchive, **options: Any) -> DataStatistics:
    checked = [
        DeviceSums.check_statistics(
            each, SumBlocks.of(bundle.manifest), f"tier-{number % 2}", ROWS, bundle.manifest
        )
        for number, each in enumerate(reports)
    ]
    return sum_up(
        checked, data, EDGES, **{"announced_rows": ROWS * len(reports), "least_group": 1, **options}
    )


def test_a_server_adds_the_reports_of_devices_and_hides_small_groups() -> None:
    bundle = compiled(IMAGES, StatisticsRequest(edges=EDGES))
    devices = [images(seed) for seed in range(3)]
    reports = [report_of(bundle, local) for local in devices]
    found = summed(IMAGES, reports, bundle, least_group=2)
    x = np.concatenate([local.x for local in devices]).astype(np.float32)
    x = x * np.float32(IMAGES.scale) + np.float32(IMAGES.shift)
    assert found.devices is not None and (found.devices.devices, found.devices.rows) == (3, 3 * ROWS)
    assert found.devices.mean == pytest.approx(x.mean((0, 2, 3), np.float64), abs=1e-8)
    assert found.devices.deviation == pytest.approx(x.std((0, 2, 3), np.float64), abs=1e-8)
    assert found.sums["square"] == sum(each["square"] for each in reports).tolist()
    assert (found.kind, found.groups) == ("channel", ("0", "1", "2"))
    assert found.tiers.keys() == {"tier-0"} and found.left_out == ("tier-1",)

    hidden = summed(IMAGES, reports, bundle, least_group=4)
    assert (hidden.devices, hidden.tiers, hidden.sums, hidden.announced_rows) == (None, {}, {}, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": ROWS + 1},
        {"rows": -1},
        {"classes": [ROWS, 1, 0, 0]},
        {"count": [ROWS * 30 + 1, 0, 0]},
        {"missing": [-1, 0, 0]},
        {"lengths": [ROWS]},
        {"sum": [[0] * 3, [1 << 62] * 3]},
        {"square": [[0] * 3, [0] * 3, [-1] * 3]},
        {"histogram": [[ROWS * 30, 1, 0, 0, 0]] * 3},
        {"histogram": 0},
    ],
)
def test_a_report_that_no_data_have_is_refused(changes: dict[str, Any]) -> None:
    bundle = compiled(IMAGES, StatisticsRequest(edges=EDGES))
    honest = report_of(bundle, images())
    for name, value in changes.items():
        sent = {**honest, name: np.array(value, np.int64)}
        with pytest.raises(UpdateRejected):
            summed(IMAGES, [sent], bundle)
    assert summed(IMAGES, [honest], bundle).devices is not None


@pytest.mark.parametrize(
    ("data", "kind", "axis", "names"),
    [
        (IMAGES, "channel", 0, ("0", "1", "2")),
        (TABLE, "feature", 0, ("age", "income", "rate")),
        (
            DataSpec(
                shape=(8, 2),
                dtype="float32",
                classes=2,
                reader=SeriesSpec(columns=("a", "b"), window=8, step=4, channels_last=True),
            ),
            "feature",
            1,
            ("a", "b"),
        ),
        (
            DataSpec(shape=(900,), dtype="float32", classes=2, reader=SoundSpec(rate=8000, length=900)),
            "value",
            None,
            ("all",),
        ),
    ],
)
def test_values_are_grouped_by_channel_or_feature(
    data: DataSpec, kind: str, axis: int | None, names: tuple[str, ...]
) -> None:
    groups = ValueGroups.of(data)
    assert (groups.kind, groups.axis, groups.names) == (kind, axis, names)


def test_a_request_that_cannot_be_is_refused() -> None:
    for wrong in (
        {"ask": ("median",)},
        {"ask": ("histogram",)},
        {"edges": (1.0,)},
        {"edges": (1.0, 0.0)},
        {"edges": (0.0, np.inf)},
    ):
        with pytest.raises(ConfigError):
            StatisticsRequest(**wrong)
    with refuses(ConfigError, ask=("lengths",)):
        StatisticsRequest(ask=("lengths",)).of(IMAGES, has_classes=True)
    with refuses(ConfigError, ask=("moments",)):
        StatisticsRequest(ask=("moments",)).of(TEXTS, has_classes=True)
    with refuses(ConfigError, ask=("classes",)):
        StatisticsRequest(ask=("classes",)).of(IMAGES, has_classes=False)


def normalized(data: DataSpec, local: LocalData) -> Normalization:
    bundle = compiled(data, StatisticsRequest(edges=EDGES))
    found = summed(data, [report_of(bundle, local)], bundle)
    assert found.normalization is not None
    return found.normalization


def test_moments_of_images_become_scale_and_shift_of_stored_values() -> None:
    local = images()
    made = normalized(IMAGES, local)
    stored = local.x.astype(np.float64)
    assert made.mean == pytest.approx(stored.mean((0, 2, 3)), rel=1e-6)
    assert made.deviation == pytest.approx(stored.std((0, 2, 3)), rel=1e-6)
    whole = stored * made.scale + made.shift
    assert (whole.mean(), whole.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, rel=1e-6))
    assert made.lines == (f"scale = {made.scale!r}", f"shift = {made.shift!r}")


def test_moments_of_features_become_mean_and_deviation_of_columns() -> None:
    local = table(policy="skip")
    made = normalized(TABLE, local)
    x = local.x[np.isfinite(local.x).all(axis=1)].astype(np.float64)
    x[np.abs(x) > 2.0**30] = np.nan
    stored = x * [10.0, 2.0, 1.0] + [40.0, 0.0, 0.0]
    assert made.mean == pytest.approx(np.nanmean(stored, 0), rel=1e-5, abs=1e-8)
    assert made.deviation == pytest.approx(np.nanstd(stored, 0), rel=1e-5)
    assert made.lines == ("[data.reader]", f"mean = {list(made.mean)}", f"deviation = {list(made.deviation)}")
