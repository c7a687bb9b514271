"""Spread of a federation's samples over its devices, without a model and without training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.analysis.spread import DataSpread, spread_of
from edgefl.api.federation import federation_of
from edgefl.api.progress import reporting
from edgefl.config import Federation
from edgefl.data.partition import histograms
from edgefl.setup.data import has_classes, how_spread, open_data, partition
from edgefl.setup.tiers import completed, device_names


def spread(
    federation: Federation | str | Path | None = None,
    *,
    devices: int = 0,
    seed: int | None = None,
    data: str | Path | None = None,
) -> DataSpread:
    """Spread a federation's samples over its devices as ``[data]`` says, and report the samples and classes of each.

    The report also measures how different the devices are. No model is built.

    Args:
        federation: objects, or their file; None: the demo.
        devices: devices to spread the samples over; 0: as many as the tiers have.
        seed: seed that replaces the federation's.
        data: folder with the dataset's standard files.

    Raises:
        DataError: the data are missing, or cannot be spread so; the message has a remedy.

    >>> edgefl.spread("federation.toml", devices=100).classes_held
    """
    settings = federation_of(federation, data=data, seed=seed)
    count = devices or len(device_names(completed(settings)))
    with reporting("reading the data and spreading it over the devices"):
        dataset = open_data(settings)
        parts = partition(settings, dataset, count)
    how, own_seed = how_spread(settings.data, dataset), settings.federation.seed
    samples = tuple(len(part) for part in parts)
    whose = dataset.owners
    owners = () if whose is None else tuple(len(np.unique(whose[part])) for part in parts)
    if not has_classes(dataset):
        return DataSpread(dataset=dataset.name, partition=how, seed=own_seed, samples=samples, owners=owners)
    names = dataset.names or tuple(str(label) for label in range(dataset.classes))
    counts = histograms(dataset.train_y, parts, dataset.classes)
    return spread_of(dataset.name, how, own_seed, samples, names, counts, owners)
