"""Results of an evaluation round: metrics of the model on the devices' own held-out rows, by tier and over devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from edgefl.wire.metrics import LOSS, METRICS, compute_metrics
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.aggregate.integer_sums import SCALE, DeviceSums
from edgefl_server.events import DeviceEvaluation, GroupResult

BINS = 10
"""Number of bins of a histogram from 0 to 1."""
_BETTER_IF_LARGE = frozenset({"accuracy", "f1", "iou"})


def summarize(
    reports: Sequence[DeviceSums], metrics: Sequence[str], *, trained_rounds: int, least_group: int
) -> DeviceEvaluation:
    """Return the results of an evaluation round.

    Args:
        reports: Reports of the devices.
        metrics: Names of the metrics that the tiers' bundles list, the main one first; unknown ones are ignored.
        trained_rounds: Number of training rounds of the model.
        least_group: Number of devices below which a group is not shown.
    """
    names = [name for name in metrics if name in METRICS]
    by_tier: dict[str, list[DeviceSums]] = {}
    for report in reports:
        by_tier.setdefault(report.tier, []).append(report)
    shown = {tier: own for tier, own in sorted(by_tier.items()) if len(own) >= least_group}
    enough = len(reports) >= max(1, least_group)
    return DeviceEvaluation(
        trained_rounds=trained_rounds,
        metric=names[0] if names else LOSS,
        devices=_group(reports, names) if enough else None,
        tiers={tier: _group(own, names) for tier, own in shown.items()},
        sums={name: total.tolist() for name, total in add_reports(reports).items()} if enough else {},
        left_out=tuple(sorted(by_tier.keys() - shown.keys())),
    )


def flat_evaluation(found: DeviceEvaluation) -> dict[str, float]:
    """Return the results of an evaluation round as numbers by name, for charts and trackers."""
    flat: dict[str, float] = {}
    if found.devices is not None:
        flat |= {f"devices.{name}": value for name, value in found.devices.metrics.items()}
        flat |= {f"devices.{name}.median": value for name, value in found.devices.median.items()}
        flat |= {f"devices.{name}.worst_decile": value for name, value in found.devices.worst_decile.items()}
    for tier, group in found.tiers.items():
        flat |= {f"tier.{tier}.{name}": value for name, value in group.metrics.items()}
    return flat


def add_reports(reports: Iterable[DeviceSums]) -> dict[str, Array]:
    """Return the exact sums of the reports by name, int64."""
    total: dict[str, Array] = {}
    for report in reports:
        for name, array in report.named.items():
            total[name] = total[name] + array if name in total else array.copy()
    return total


def _group(reports: Sequence[DeviceSums], names: Sequence[str]) -> GroupResult:
    own = [_metrics(report.named, names) for report in reports]
    total = _scaled(add_reports(reports))
    values = {name: np.array([each[name] for each in own if name in each]) for name in (*names, LOSS)}
    values = {name: array for name, array in values.items() if array.size}
    main = names[0] if names else LOSS
    is_share = main in _BETTER_IF_LARGE and main in values
    return GroupResult(
        devices=len(reports),
        rows=float(total.get("count", total.get("tokens", np.zeros(())))),
        metrics=_metrics(add_reports(reports), names),
        median={name: float(np.median(array)) for name, array in values.items()},
        worst_decile={
            name: float(np.quantile(array, 0.1 if name in _BETTER_IF_LARGE else 0.9))
            for name, array in values.items()
        },
        histogram=tuple(np.histogram(values[main], BINS, (0.0, 1.0))[0].tolist()) if is_share else (),
    )


def _metrics(sums: Mapping[str, Array], names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of integer sums by name. Values that are not finite, such as those of no row, are left out."""
    found = compute_metrics(names, _scaled(sums))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _scaled(sums: Mapping[str, Array]) -> Arrays:
    return {name: np.asarray(array, np.float64) / SCALE for name, array in sums.items()}
