"""Statistics of batch norm that devices measured: kept by the server for each submodel size, beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgefl.wire.norm_statistics import MEASURED, NORM_BITS, ROWS, unit_of
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.aggregate.integer_sums import DeviceSums

_MOST_SQUARE = 16.0
"""A device's mean square of a channel counts at most as this multiple of the median over the devices."""
_FEWEST_BOUNDED = 3
"""Devices from which on there is a median that one of them cannot move at will."""


@dataclass(frozen=True)
class NormFamilies:
    """Groups of tiers (families) whose devices share the statistics of batch norm.

    Attributes:
        by_tier: Name of each tier's family. If empty, devices measure no statistics.
        variances: For the name of each moving variance, the name of its moving mean.
    """

    by_tier: Mapping[str, str] = field(default_factory=dict)
    variances: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units under which the server publishes the statistics, one per family."""
        return tuple(dict.fromkeys(unit_of(family) for family in self.by_tier.values()))

    def covers(self, tier: str, weights: Mapping[str, Array], trained: int) -> bool:
        """Return True if devices of ``tier`` can evaluate a model after ``trained`` training rounds.

        They can if the tier needs no measured statistics, or if those in ``weights`` were measured after that round.
        """
        if tier not in self.by_tier:
            return True
        return float(weights[f"{unit_of(self.by_tier[tier])}.{MEASURED}"]) == trained


NO_NORMS = NormFamilies()


def measured_statistics(
    norms: NormFamilies,
    reports: Sequence[DeviceSums],
    weights: Mapping[str, Array],
    trained: int,
    weight_cap: float,
) -> Arrays:
    """Return the batch norm statistics that the devices measured, by the server's tensor names.

    A family is left out if no device measured one of its statistics. The order of the reports does not matter.

    Args:
        norms: The families.
        reports: Reports of a measuring round.
        weights: Model and statistics so far, by name.
        trained: Number of training rounds of the model.
        weight_cap: Largest number of rows that a device counts with, as a multiple of the median over the devices; 0
            for no bound.
    """
    found: Arrays = {}
    for family in sorted(set(norms.by_tier.values())):
        own = [each.named for each in reports if norms.by_tier.get(each.tier) == family]
        unit = unit_of(family)
        kept = {name.removeprefix(f"{unit}.") for name in weights if name.startswith(f"{unit}.")} - {MEASURED}
        new: Arrays = {}
        for variance, mean in norms.variances.items():
            holders = [each for each in own if variance in each and int(each[ROWS])]
            if holders:
                new[mean], new[variance] = _moments(holders, mean, variance, weight_cap)
        if kept and kept == new.keys():
            found |= {f"{unit}.{name}": array for name, array in new.items()}
            found[f"{unit}.{MEASURED}"] = np.array(trained, np.float32)
    return found


def _moments(
    reports: Sequence[Mapping[str, Array]], mean: str, variance: str, weight_cap: float
) -> tuple[Array, Array]:
    """Return the mean and the variance per channel over the rows of all ``reports``, both float32 [channels].

    Outliers are bounded: the mean square of one device by a multiple of the median over devices, and its number of rows by
    ``weight_cap`` times the median.
    """
    rows = np.array([[int(each[ROWS])] for each in reports], np.float64)
    means = np.stack([each[mean].astype(np.float64) for each in reports]) / 2.0**NORM_BITS
    deviations = np.stack([each[variance].astype(np.float64) for each in reports]) / 2.0**NORM_BITS
    squares = deviations**2 + means**2
    if len(reports) >= _FEWEST_BOUNDED:
        usual = np.median(squares, axis=0)
        # Most devices may lack a feature that others have. Its bound is then that of the layer's mean over channels.
        usual = np.where(usual > 0, usual, np.median(squares.mean(axis=1)))
        squares = np.minimum(squares, _MOST_SQUARE * usual)
        if weight_cap:
            rows = np.minimum(rows, weight_cap * np.sort(rows, axis=0)[(len(rows) - 1) // 2])
    means = np.clip(means, -np.sqrt(squares), np.sqrt(squares))
    share = rows / rows.sum()
    # Sorted, so that the order of arrival does not change the last bits.
    total, square = (np.sort(share * each, axis=0).sum(axis=0) for each in (means, squares))
    return total.astype(np.float32), np.maximum(square - total**2, 0.0).astype(np.float32)
