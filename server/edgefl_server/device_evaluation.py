"""Results of an evaluation round: metrics of the model on the devices' own held-out rows, by tier and over devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from edgefl.wire.metrics import LOSS, METRICS, mean_loss
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.aggregate.integer_sums import SCALE, DeviceSums
from edgefl_server.events import DeviceEvaluation, GroupResult

BINS = 10
"""Number of bins of a histogram from 0 to 1."""
_BETTER_IF_LARGE = frozenset({"accuracy", "f1", "iou"})


def summarize(
    reports: Sequence[DeviceSums],
    metrics: Sequence[str],
    *,
    trained_rounds: int,
    least_group: int,
    unmeasured: Sequence[str] = (),
) -> DeviceEvaluation:
    """Return the results of an evaluation round.

    Args:
        reports: Reports of the devices.
        metrics: Names of the metrics that the tiers' bundles list, the main one first; unknown ones are ignored.
        trained_rounds: Number of training rounds of the model.
        least_group: Number of devices below which a group is not shown.
        unmeasured: Tiers whose reports are missing, because no statistics of batch norm were measured for them.
    """
    names = [name for name in metrics if name in METRICS]
    by_tier: dict[str, list[DeviceSums]] = {}
    for report in reports:
        by_tier.setdefault(report.tier, []).append(report)
    shown = {tier: own for tier, own in sorted(by_tier.items()) if len(own) >= least_group}
    hidden = len(reports) - sum(map(len, shown.values()))
    if hidden < least_group:  # the difference of all and of the shown tiers would show so few
        reports = [report for own in shown.values() for report in own]
    enough = len(reports) >= max(1, least_group)
    return DeviceEvaluation(
        trained_rounds=trained_rounds,
        metric=names[0] if names else LOSS,
        devices=_group(reports, names) if enough else None,
        tiers={tier: _group(own, names) for tier, own in shown.items()},
        sums={name: total.tolist() for name, total in add_reports(reports).items()} if enough else {},
        left_out=tuple(sorted({*by_tier.keys() - shown.keys(), *unmeasured})),
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
    """Return the exact sums of the reports by name, as arrays of Python's integers, which cannot overflow."""
    total: dict[str, Array] = {}
    for report in reports:
        for name, array in report.named.items():
            own = np.asarray(array.astype(object))
            total[name] = np.asarray(total[name] + own) if name in total else own
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
        rows=float(total.get("count", np.zeros(()))),
        metrics=_metrics(add_reports(reports), names),
        median={name: float(np.median(array)) for name, array in values.items()},
        worst_decile={
            name: float(np.quantile(array, 0.1 if name in _BETTER_IF_LARGE else 0.9))
            for name, array in values.items()
        },
        histogram=tuple(np.histogram(values[main], BINS, (0.0, 1.0))[0].tolist()) if is_share else (),
    )


def _metrics(sums: Mapping[str, Array], names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of integer sums by name. Metrics without their sums, and values that are not finite, are left
    out.
    """
    scaled, found = _scaled(sums), dict[str, float]()
    for name in (*names, LOSS):
        with suppress(KeyError):
            found[name] = METRICS[name](scaled) if name != LOSS else mean_loss(scaled)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _scaled(sums: Mapping[str, Array]) -> Arrays:
    return {name: np.asarray(array, np.float64) / SCALE for name, array in sums.items()}
