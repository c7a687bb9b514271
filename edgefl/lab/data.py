"""The data of a run on one machine: one dataset, spread over the devices."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from edgefl.config import Federation
from edgefl.data import datasets
from edgefl.data.dataset import Dataset
from edgefl.data.partition import by_labels, dirichlet, iid
from edgefl.wire.errors import DataError

# Rows that a Dirichlet draw leaves each device at least: as benchmarks have it (fedbat.md 4.2), or if no draw does, two.
WANTED_SAMPLES = 10
FEWEST_SAMPLES = 2


def open_data(federation: Federation) -> Dataset:
    table = federation.data
    directory = Path(table.dir) if table.dir else None
    loaded = datasets.load(table.name, directory, download=table.download)
    return loaded.limited(table.train_samples, table.test_samples, seed=federation.federation.seed)


def partition(federation: Federation, dataset: Dataset, devices: int) -> list[Any]:
    """Row numbers per device, as ``[data]`` says. DataError, with the remedy, if the samples cannot be spread so."""
    table, labels, seed = federation.data, dataset.train_y, federation.federation.seed
    if table.partition == "iid":
        return list(iid(labels, devices, seed=seed))
    if table.partition == "labels":
        return list(by_labels(labels, devices, per_client=table.labels_per_device, seed=seed))
    spread = partial(dirichlet, labels, devices, alpha=table.alpha, seed=seed)
    with suppress(DataError):
        return list(spread(min_samples=WANTED_SAMPLES))
    return list(spread(min_samples=FEWEST_SAMPLES))
