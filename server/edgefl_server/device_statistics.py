"""Statistics of the devices' own data: exact counts and moments, by tier and over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SeriesSpec, TableSpec
from edgefl.wire.statistics import ValueGroups, value_of
from edgefl.wire.tensors import Array
from edgefl_server.aggregate.integer_sums import DeviceSums
from edgefl_server.events import DataStatistics, GroupStatistics, Normalization


def sum_up(
    reports: Sequence[DeviceSums],
    data: DataSpec,
    edges: Sequence[float],
    *,
    announced_rows: int,
    least_group: int,
) -> DataStatistics:
    """Return the statistics of the data of the devices that sent ``reports``.

    Args:
        reports: Reports of the devices.
        data: Shape of a sample, and names of its classes.
        edges: Edges of the histogram's bins.
        announced_rows: Number of rows that these devices announced.
        least_group: Number of devices below which a group is not shown.
    """
    by_tier: dict[str, list[DeviceSums]] = {}
    for report in reports:
        by_tier.setdefault(report.tier, []).append(report)
    shown = {tier: own for tier, own in sorted(by_tier.items()) if len(own) >= least_group}
    enough = len(reports) >= max(1, least_group)
    total = _total(reports) if enough else {}
    groups = ValueGroups.of(data)
    everyone = _statistics(len(reports), total) if enough else None
    return DataStatistics(
        kind=groups.kind,
        groups=groups.names,
        class_names=data.names or tuple(map(str, range(data.classes))),
        edges=tuple(edges),
        devices=everyone,
        tiers={tier: _statistics(len(own), _total(own)) for tier, own in shown.items()},
        sums={name: array.tolist() for name, array in total.items()},
        announced_rows=announced_rows if enough else 0,
        left_out=tuple(sorted(by_tier.keys() - shown.keys())),
        normalization=_normalization(everyone, data)
        if everyone is not None and any(everyone.count)
        else None,
    )


def _total(reports: Sequence[DeviceSums]) -> dict[str, Array]:
    """Return the exact sums of the reports by name, as arrays of Python integers."""
    found: dict[str, Array] = {}
    for name in reports[0].named if reports else ():
        arrays = [report.named[name].astype(object) for report in reports]
        found[name] = np.asarray(np.stack(arrays).sum(axis=0), object)
    return found


def _statistics(devices: int, total: dict[str, Array]) -> GroupStatistics:
    """Return the statistics of ``devices`` devices from their exact sums."""
    counts = {
        name: tuple(total[name].tolist())
        for name in ("classes", "count", "beyond", "missing", "lengths")
        if name in total
    }
    means, deviations = list[float | None](), list[float | None]()
    if "sum" in total:
        for count, added, squares in zip(
            counts["count"], value_of(total["sum"]), value_of(total["square"]), strict=True
        ):
            mean = added / count if count else None
            means.append(None if mean is None else float(mean))
            # Of rounded values, the difference may be below 0 by the rounding.
            deviations.append(
                None if mean is None else math.sqrt(max(0.0, float(squares / count - mean * mean)))
            )
    histogram = tuple(map(tuple, total["histogram"].tolist())) if "histogram" in total else ()
    return GroupStatistics(
        devices=devices,
        rows=int(total["rows"]),
        mean=tuple(means),
        deviation=tuple(deviations),
        histogram=histogram,
        **counts,
    )


def _normalization(moments: GroupStatistics, data: DataSpec) -> Normalization:
    """Return the normalisation that gives stored values mean 0 and deviation 1.

    Args:
        moments: Mean and deviation of the values as a model reads them.
        data: Reader settings, whose scale, shift, mean and deviation are undone to get stored values.
    """
    means = [Fraction(mean or 0.0) for mean in moments.mean]
    variances = [Fraction(deviation or 0.0) ** 2 for deviation in moments.deviation]
    reader = data.reader
    by_column = isinstance(reader, TableSpec | SeriesSpec) and len(reader.columns) == len(means)
    if by_column:
        assert isinstance(reader, TableSpec | SeriesSpec)
        shifts = [Fraction(each) for each in reader.mean or [0.0] * len(means)]
        scales = [Fraction(each) for each in reader.deviation or [1.0] * len(means)]
    else:
        scales = [1 / Fraction(data.scale or 1.0)] * len(means)
        shifts = [-Fraction(data.shift) * scale for scale in scales]
    means = [mean * scale + shift for mean, scale, shift in zip(means, scales, shifts, strict=True)]
    variances = [variance * scale**2 for variance, scale in zip(variances, scales, strict=True)]

    # All values together: the variance of the groups and that of their means.
    total = sum(moments.count)
    mean = sum((each * count for each, count in zip(means, moments.count, strict=True)), Fraction()) / total
    squares = (
        (variance + each**2) * count
        for variance, each, count in zip(variances, means, moments.count, strict=True)
    )
    deviation = _root(sum(squares, Fraction()) / total - mean**2)
    return Normalization(
        mean=tuple(map(float, means)),
        deviation=tuple(map(_root, variances)),
        scale=1 / deviation,
        shift=float(-mean / Fraction(deviation)),
        by_column=by_column,
    )


def _root(variance: Fraction) -> float:
    return math.sqrt(max(0.0, float(variance))) or 1.0
