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
from edgefl.wire.statistics import LIMB_BITS, ValueGroups
from edgefl.wire.tensors import Array
from edgefl.wire.update.form import DENSE
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.adders import CheckedArrays, readable
from edgefl_server.aggregate.aggregator import Aggregator, PartialSum
from edgefl_server.aggregate.averaging import PartialAverage
from edgefl_server.aggregate.checks import check_names_and_types
from edgefl_server.aggregate.scatter import Layout, TierBlocks

SCALE = 2.0**16
"""Devices report each sum as the whole number nearest to its value times this (:mod:`edgefl.algorithms.evaluation`)."""

_COUNTS = frozenset({"count", "tokens", "correct", "tp", "fp", "fn"})
"""Sums that count labels. None is larger than ``count``, if there is one."""

MOST = 1 << 53
"""Largest magnitude of a reported sum. The sums of 1,000 devices then stay below 2^63."""


class SumBlocks(TierBlocks):
    """Layout of a report: int64 arrays that belong to no tensor of the model."""

    @classmethod
    def of(cls, manifest: Manifest) -> SumBlocks:
        """Return the layout of the reports of a tier, from the outputs of its bundle's ``finish`` graph."""
        ports = manifest.graph(manifest.finish).outputs_of("update")
        shapes = {port.label: port.shape for port in ports}
        size = sum(map(math.prod, shapes.values()))
        return cls(DENSE, {}, shapes, tuple(shapes), (), np.zeros(0, np.int64), size, 0)

    @staticmethod
    def labels(manifest: Manifest) -> int:
        """Return the number of labels of one row."""
        graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
        ports = [port for name in graphs for port in manifest.graph(name).inputs_of("batch")]
        return max((math.prod(port.shape[1:]) for port in ports if port.label == "0.y"), default=1)

    @cached_property
    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: ("int64", shape) for name, shape in self.shapes.items()}


@dataclass(frozen=True)
class DeviceSums(CheckedArrays):
    """Checked report of one device of ``tier``."""

    tier: str = field(kw_only=True)

    @classmethod
    def check(
        cls, arrays: Mapping[str, Array], pieces: SumBlocks, tier: str, most_labels: float = math.inf
    ) -> DeviceSums:
        """Return the report ``arrays`` of a device of ``tier`` with at most ``most_labels`` labels.

        Raises:
            UpdateRejected: If a name, dtype or shape is wrong, or a value is out of range.
        """
        check_names_and_types(arrays, pieces)
        for name, array in arrays.items():
            if array.size and not -MOST <= int(array.min()) <= int(array.max()) <= MOST:
                raise UpdateRejected(
                    "too-large",
                    f"sum {name} should lie between -2^53 and 2^53, found {int(array.min())} to {int(array.max())}; the "
                    "model gives values that are no use on this device",
                    name=name,
                )
        for name in _COUNTS & arrays.keys():
            most = _most(arrays, "" if name == "count" else "count", most_labels)
            if not 0 <= int(arrays[name].min(initial=0)) <= int(arrays[name].max(initial=0)) <= most:
                raise UpdateRejected(
                    "wrong-sums",
                    f"sum {name} should lie between 0 and the number of the device's labels, {most / SCALE:g}, found "
                    f"{int(arrays[name].max(initial=0)) / SCALE:g}; evaluate by the bundle's graph",
                    name=name,
                )
        return cls(pieces, tuple(readable(arrays[name]) for name in pieces.sources), tier=tier)

    @classmethod
    def check_statistics(
        cls, arrays: Mapping[str, Array], pieces: SumBlocks, tier: str, rows: int, manifest: Manifest
    ) -> DeviceSums:
        """Return the statistics ``arrays`` of a device of ``tier`` with ``rows`` rows.

        Args:
            arrays: Sums by name (:class:`edgefl.algorithms.statistics`).
            pieces: Their shapes.
            tier: Tier of the device.
            rows: Number of rows that the device used.
            manifest: Bundle with which it computed them.

        Raises:
            UpdateRejected: If a name, dtype or shape is wrong, or a number cannot be.
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


def _check_range(name: str, found: Any, least: Any, most: Any, *, signed_last: bool = False) -> None:
    magnitudes = np.concatenate([found[:-1], abs(found[-1:])]) if signed_last else found
    if not np.all((least <= magnitudes) & (magnitudes <= most)):
        raise UpdateRejected(
            "wrong-sums",
            f"sum {name} has numbers that no data of so many rows have; compute it by the bundle's graph",
            name=name,
        )


def _most(arrays: Mapping[str, Array], counted: str, most_labels: float) -> float:
    """Return the upper bound of a sum: ``most_labels``, or the sum called ``counted`` if that is less."""
    most = min(float(MOST), most_labels * SCALE)
    return min(most, float(arrays[counted])) if counted in arrays else most


class IntegerSums(Aggregator):
    """Aggregator of an evaluation round: collects the devices' reports.

    Attributes:
        reports: Reports so far, in the order of their arrival.
    """

    def __init__(self, sums: Accumulator | None = None) -> None:
        super().__init__(Layout({}, {}, 0), weight_limit=1)
        self.reports: list[DeviceSums] = []
        self._kept = sums

    def add(self, checked: CheckedArrays, weight: int, share: float = 1.0) -> None:
        """Keep a report, a :class:`DeviceSums`. Its weight does not matter."""
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
        """Return the accumulator of the round before, for the next one."""
        return self._kept
