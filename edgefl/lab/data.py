"""The data of a run on one machine: one dataset, spread over the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgefl.config import Federation
from edgefl.data import datasets
from edgefl.data.dataset import Dataset
from edgefl.data.partition import dirichlet, iid


def open_data(federation: Federation) -> Dataset:
    table = federation.data
    directory = Path(table.dir) if table.dir else None
    loaded = datasets.load(table.name, directory, download=table.download)
    return loaded.limited(table.train_samples, table.test_samples, seed=federation.federation.seed)


def partition(federation: Federation, dataset: Dataset, devices: int) -> list[Any]:
    """Row numbers per device."""
    seed = federation.federation.seed
    if federation.data.partition == "iid":
        return list(iid(dataset.train_y, devices, seed=seed))
    return list(dirichlet(dataset.train_y, devices, alpha=federation.data.alpha, seed=seed, min_samples=2))
