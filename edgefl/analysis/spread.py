"""Distribution of a federation's samples over its devices: numbers, classes and dissimilarity."""

from __future__ import annotations

import csv
import io
from statistics import fmean, median, pstdev

import msgspec

from edgefl.analysis import charts
from edgefl.analysis.heterogeneity.labels import frequencies_of, mean_pairwise, total_variation
from edgefl.data.dataset import Array

DRAWN = 200
"""Devices in a picture at most: the first ones."""


class DataSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a dataset's samples over a federation's devices.

    Attributes:
        dataset: name of the dataset.
        partition: the partition, as in a federation file.
        seed: seed of the partition.
        samples: number of samples per device.
        classes: names of the classes; empty unless each sample has one class.
        counts: samples per device and class, (devices, classes); empty without classes.
        distance_to_mean: mean total variation of the devices' class frequencies from the mean over devices: 0 for equal
            devices, near 1 for devices without a common class. None without classes.
        distance_between: mean total variation between two devices' class frequencies. None without classes.
        owners: number of authors, speakers or documents per device; empty for data without owners.
    """

    dataset: str
    partition: str
    seed: int
    samples: tuple[int, ...]
    classes: tuple[str, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    distance_to_mean: float | None = None
    distance_between: float | None = None
    owners: tuple[int, ...] = ()

    @property
    def size_deviation(self) -> float:
        """Standard deviation of the devices' numbers of samples, divided by their mean."""
        return pstdev(self.samples) / fmean(self.samples)

    @property
    def fewest(self) -> int:
        return min(self.samples)

    @property
    def middle(self) -> float:
        """Median number of samples of a device."""
        return median(self.samples)

    @property
    def most(self) -> int:
        return max(self.samples)

    @property
    def classes_held(self) -> tuple[int, ...]:
        """Number of classes per device; empty for samples without classes."""
        return tuple(sum(count > 0 for count in row) for row in self.counts)


def spread_of(
    dataset: str,
    partition: str,
    seed: int,
    samples: tuple[int, ...],
    classes: tuple[str, ...],
    counts: Array,
    owners: tuple[int, ...] = (),
) -> DataSpread:
    """Compute the distribution of samples that have one class each.

    Args:
        dataset: name of the dataset.
        partition: the partition, as in a federation file.
        seed: seed of the partition.
        samples: number of samples per device.
        classes: names of the classes.
        counts: samples per device and class, int64 (devices, classes).
        owners: number of owners per device, if samples have owners.

    Returns:
        The distribution with its distances.

    Raises:
        DataError: if a device has no sample.
    """
    frequencies = frequencies_of(counts)
    to_mean = total_variation(frequencies, frequencies.mean(axis=0))
    return DataSpread(
        dataset=dataset,
        partition=partition,
        seed=seed,
        samples=samples,
        classes=classes,
        counts=tuple(tuple(row) for row in counts.tolist()),
        distance_to_mean=float(to_mean.mean()),
        distance_between=mean_pairwise(frequencies),
        owners=owners,
    )


def table(spread: DataSpread) -> str:
    """Return a CSV with a row per device: its samples, its owners if known, and its samples of each class."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["device", "samples", *(["owners"] if spread.owners else []), *spread.classes])
    for device, samples in enumerate(spread.samples):
        own = [spread.owners[device]] if spread.owners else []
        rows.writerow([device, samples, *own, *(spread.counts[device] if spread.counts else ())])
    return file.getvalue()


def picture(spread: DataSpread) -> str:
    """Return an SVG with the samples per device and class, or per device if samples have no classes."""
    shown = min(DRAWN, len(spread.samples))
    some = "" if shown == len(spread.samples) else f", the first {shown} of {len(spread.samples):,} devices"
    title = f"{spread.dataset}, partition {spread.partition}, seed {spread.seed}{some}"
    names = [str(device) for device in range(shown)]
    if spread.counts:
        matrix = [list(map(float, row)) for row in spread.counts[:shown]]
        return charts.heatmap(matrix, names, spread.classes, title=title, x="class", y="device")
    return charts.bar_chart(
        dict(zip(names, map(float, spread.samples), strict=False)), title=title, x="device", y="samples"
    )
