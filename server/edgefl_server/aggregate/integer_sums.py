"""Reports of an evaluation round: integer sums over a device's held-out rows. They are checked and kept, not averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from edgefl.errors import UpdateRejected
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.metrics import REPORT_BITS, REPORT_LIMIT
from edgefl.wire.norm_statistics import NORM_BITS, NORM_LIMIT, ROWS
from edgefl.wire.statistics import LIMB_BITS, ValueGroups
from edgefl.wire.tensors import Array
from edgefl.wire.update.form import DENSE
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.adders import CheckedArrays, readable
from edgefl_server.aggregate.aggregator import Aggregator, PartialSum
from edgefl_server.aggregate.averaging import PartialAverage
from edgefl_server.aggregate.checks import check_names_and_types
from edgefl_server.aggregate.scatter import Layout, TierBlocks

SCALE = 2.0**REPORT_BITS
"""Factor of reported sums."""

_NEVER_NEGATIVE = frozenset({"weight", "weighted_correct", "absolute", "nll"})


class SumBlocks(TierBlocks):
    """Layout of the integer sums that a device reports instead of an update.

    A report holds int64 arrays that belong to no tensor of the model.
    """

    @classmethod
    def of(cls, manifest: Manifest) -> SumBlocks:
        """Return the layout of the reports of a tier, as given by the outputs of the ``finish`` graph in its
        ``manifest``.
        """
        ports = manifest.graph(manifest.finish).outputs_of("update")
        shapes = {port.label: port.shape for port in ports}
        size = sum(map(math.prod, shapes.values()))
        return cls(DENSE, {}, shapes, tuple(shapes), (), np.zeros(0, np.int64), size, 0)

    @staticmethod
    def labels(manifest: Manifest) -> int:
        """Return the number of labels that each row (sample) of the tier's data has; 1 without labels."""
        graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
        ports = [port for name in graphs for port in manifest.graph(name).inputs_of("batch")]
        return max((math.prod(port.shape[1:]) for port in ports if port.label == "0.y"), default=1)

    @cached_property
    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: ("int64", shape) for name, shape in self.shapes.items()}


@dataclass(frozen=True)
class DeviceSums(CheckedArrays):
    """Validated report of one device of ``tier``: integer sums over its rows, for an evaluation or for statistics."""

    tier: str = field(kw_only=True)

    @classmethod
    def check(
        cls, arrays: Mapping[str, Array], pieces: SumBlocks, tier: str, rows: int, labels: int = 1
    ) -> DeviceSums:
        """Validate the evaluation report of a device and return it.

        Args:
            arrays: Sums by name, int64 in fixed point.
            pieces: Layout of the tier's reports.
            tier: Tier of the device.
            rows: Number of rows (samples) that the device evaluated.
            labels: Number of labels of one row.

        Raises:
            UpdateRejected: If a name, dtype or shape is wrong, or a value is out of range.
        """
        check_names_and_types(arrays, pieces)
        for name, array in arrays.items():
            if array.size and not -REPORT_LIMIT < int(array.min()) <= int(array.max()) < REPORT_LIMIT:
                raise UpdateRejected(
                    "not-finite",
                    f"sum {name} should be finite and below 2^36, found {int(array.max()) / SCALE:g}; the model is "
                    "no use on this device",
                    name=name,
                )
        for name, most in _bounds(arrays, rows, labels).items():
            _check_range(name, arrays[name].astype(object), 0, most)
        return cls(pieces, tuple(readable(arrays[name]) for name in pieces.sources), tier=tier)

    @classmethod
    def check_statistics(
        cls, arrays: Mapping[str, Array], pieces: SumBlocks, tier: str, rows: int, manifest: Manifest
    ) -> DeviceSums:
        """Validate the data statistics that a device reports, and return them.

        Args:
            arrays: Sums by name (:class:`edgefl.algorithms.statistics`).
            pieces: Layout of the tier's reports.
            tier: Tier of the device.
            rows: Number of rows that the device used.
            manifest: Manifest of the bundle that computed the sums.

        Raises:
            UpdateRejected: If a name, dtype or shape is wrong, or a sum is impossible for this number of rows.
        """
        check_names_and_types(arrays, pieces)
        found = {name: array.astype(object) for name, array in arrays.items()}
        values = rows * math.prod(manifest.data.shape) // len(ValueGroups.of(manifest.data).names)
        bounds = {"rows": rows, "classes": rows * SumBlocks.labels(manifest), "lengths": rows}
        for name in found.keys() - {"sum", "square"}:
            _check_range(name, found[name], 0, bounds.get(name, values))
            if name in ("classes", "lengths", "histogram"):
                _check_range(name, found[name].sum(axis=-1), 0, bounds.get(name, values))
        for name in {"sum", "square"} & found.keys():
            # Each limb adds numbers from 0 to 2^30 - 1; the last one of a sum of values has their sign.
            most = found["count"] << LIMB_BITS
            _check_range(name, found[name], 0, most, signed_last=name == "sum")
        return cls(pieces, tuple(readable(arrays[name]) for name in pieces.sources), tier=tier)

    @classmethod
    def check_norms(cls, arrays: Mapping[str, Array], pieces: SumBlocks, tier: str, rows: int) -> DeviceSums:
        """Validate the batch norm statistics that a device measured, and return them.

        Args:
            arrays: Means and deviations by name, in fixed point, and the number of rows.
            pieces: Layout of the tier's reports.
            tier: Tier of the device.
            rows: Number of rows that the device claims in its message.

        Raises:
            UpdateRejected: If a name, dtype or shape is wrong, a value is not finite, or the arrays name another
                number of rows.
        """
        check_names_and_types(arrays, pieces)
        _check_range(ROWS, arrays[ROWS].astype(object).reshape(1), rows, rows)
        for name, array in arrays.items():
            if array.size and not -NORM_LIMIT < int(array.min()) <= int(array.max()) < NORM_LIMIT:
                raise UpdateRejected(
                    "not-finite",
                    f"the moments of {name} should be finite, found {int(array.max()) / 2.0**NORM_BITS:g}; the model is no "
                    "use on this device",
                    name=name,
                )
        return cls(pieces, tuple(readable(arrays[name]) for name in pieces.sources), tier=tier)


def _check_range(name: str, found: Any, least: Any, most: Any, *, signed_last: bool = False) -> None:
    magnitudes = np.concatenate([found[:-1], abs(found[-1:])]) if signed_last else found
    if not np.all((least <= magnitudes) & (magnitudes <= most)):
        raise UpdateRejected(
            "wrong-sums",
            f"sum {name} has numbers that no data of so many rows have; compute it by the bundle's graph",
            name=name,
        )


def _bounds(arrays: Mapping[str, Array], rows: int, labels: int) -> dict[str, int]:
    """Return the largest possible value of each sum that cannot be negative, by name.

    A device with ``rows`` rows of ``labels`` labels each cannot count more than these.
    """
    of_labels = math.ceil(rows * labels * SCALE)
    bounds = dict.fromkeys({"tokens", "correct", "tp", "fp", "fn"}, of_labels) | {
        "count": math.ceil(rows * SCALE)
    }
    if labels == 1 and "count" in arrays:
        bounds["correct"] = int(arrays["count"])
    bounds |= dict.fromkeys(_NEVER_NEGATIVE, REPORT_LIMIT)
    if "weight" in arrays:
        bounds["weighted_correct"] = int(arrays["weight"])
    return {name: most for name, most in bounds.items() if name in arrays}


class ReportCollector(Aggregator):
    """Collector of the devices' reports in a round without training; it has the interface of :class:`Aggregator`.

    Attributes:
        reports: Reports so far, in the order of their arrival.
    """

    def __init__(self, sums: Accumulator | None = None) -> None:
        super().__init__(Layout({}, {}, 0), weight_limit=1)
        self.reports: list[DeviceSums] = []
        self._kept = sums

    def add(self, checked: CheckedArrays, weight: int, share: float = 1.0) -> None:
        """Add a device's report, which must be a :class:`DeviceSums`. ``weight`` and ``share`` are ignored."""
        assert isinstance(checked, DeviceSums)
        self.reports.append(checked)

    def partial(self) -> PartialSum | None:
        """Return the reports so far, or None if there is none."""
        nothing = np.zeros(0, np.int64)
        return (
            PartialSum(False, 0, PartialAverage(nothing, nothing), reports=tuple(self.reports))
            if self.reports
            else None
        )

    def take(self, partial: PartialSum) -> None:
        """Add the reports that another aggregator of the same round collected."""
        self.reports += [each for each in partial.reports if isinstance(each, DeviceSums)]

    def release_sums(self) -> Accumulator | None:
        """Return the unused accumulator of the last training round, so that the next one can reuse its memory."""
        return self._kept
