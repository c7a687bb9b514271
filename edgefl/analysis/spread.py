"""How a federation's samples are spread over its devices: how many, of which classes, and how unlike they are."""

from __future__ import annotations

import csv
import io
from statistics import fmean, median, pstdev

import msgspec

from edgefl.analysis.charts import svg
from edgefl.analysis.heterogeneity.labels import frequencies_of, mean_pairwise, total_variation
from edgefl.data.dataset import Array

DRAWN = 200
"""Devices that a picture shows at most: the first ones."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of ``dataset`` by ``partition`` (as in a federation file) and ``seed``; ``samples`` is each device's number.

    Where a sample has one class, ``counts`` (devices, classes) has a device's samples of each of ``classes``, and
    ``distance_to_mean`` and ``distance_between`` are the mean total variations of their class frequencies from the mean over
    devices and from one another: 0 where all are alike, towards 1 where they share no class. Else these are empty and null.
    ``owners``: how many authors, speakers or documents each device has samples of, where samples say whose they are.
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
        """Deviation of the devices' numbers of samples over their mean: 0 where all have as many."""
        return pstdev(self.samples) / fmean(self.samples)

    @property
    def fewest(self) -> int:
        return min(self.samples)

    @property
    def middle(self) -> float:
        """The median number of samples."""
        return median(self.samples)

    @property
    def most(self) -> int:
        return max(self.samples)

    @property
    def classes_held(self) -> tuple[int, ...]:
        """How many classes each device has a sample of; empty where samples have none."""
        return tuple(sum(count > 0 for count in row) for row in self.counts)


def spread_of(
    dataset: str,
    partition: str,
    seed: int,
    samples: tuple[int, ...],
    classes: tuple[str, ...],
    counts: Array,
    owners: tuple[int, ...] = (),
) -> Spread:
    """From the samples per device and class, int64 (devices, classes)."""
    frequencies = frequencies_of(counts)
    to_mean = total_variation(frequencies, frequencies.mean(axis=0))
    return Spread(
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


def table(spread: Spread) -> str:
    """A CSV: a row for each device, its samples, its owners where there are some, and its samples of each class."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["device", "samples", *(["owners"] if spread.owners else []), *spread.classes])
    for device, samples in enumerate(spread.samples):
        own = [spread.owners[device]] if spread.owners else []
        rows.writerow([device, samples, *own, *(spread.counts[device] if spread.counts else ())])
    return file.getvalue()


def picture(spread: Spread) -> str:
    """An SVG: samples per device and class, or per device."""
    shown = min(DRAWN, len(spread.samples))
    some = "" if shown == len(spread.samples) else f", the first {shown} of {len(spread.samples):,} devices"
    title = f"{spread.dataset}, partition {spread.partition}, seed {spread.seed}{some}"
    names = [str(device) for device in range(shown)]
    if spread.counts:
        matrix = [list(map(float, row)) for row in spread.counts[:shown]]
        return svg.heatmap(matrix, names, spread.classes, title=title, x="class", y="device")
    return svg.bar_chart(
        dict(zip(names, map(float, spread.samples), strict=False)), title=title, x="device", y="samples"
    )
