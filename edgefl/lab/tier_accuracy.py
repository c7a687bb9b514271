"""Accuracy of each tier's submodel of a finished run, on the test set."""

from __future__ import annotations

from pathlib import Path

from edgefl.config import load, without_devices
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.lab.cuts import chosen
from edgefl.lab.deployment import Workshop
from edgefl.lab.written import CONFIG_NAME, MODEL_NAME
from edgefl.setup.data import open_data
from edgefl.setup.samples import data_spec
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import read_bundle

BUNDLES = "bundles/*.efl"


def accuracy_on_test_set(run: Path) -> dict[str, float]:
    """Share of the test set that each tier's submodel of the model in the folder ``run`` classifies rightly.

    A submodel that freezes units at the input side is the whole model on a device: such tiers are equal. Batch norm
    has the statistics that `edgefl deploy` gives it. Nothing is downloaded. OSError or an error of ours if model,
    configuration or data cannot be read, or the data here are not those of the run.
    """
    weights = tensors.load((run / MODEL_NAME).read_bytes())
    federation = without_devices(load(run / CONFIG_NAME, {}))
    here = federation.data.model_copy(update={"download": False})
    federation = federation.model_copy(update={"data": here})
    dataset = open_data(federation)
    _check_same(run, dataset, named=here.name != "auto")
    workshop = Workshop.of(federation, dataset, weights)
    spec = workshop.spec
    if workshop.metric != "accuracy":
        raise DataError(f"the run in {run} is measured by {workshop.metric}, not by accuracy", path=str(run))
    accuracies: dict[str, float] = {}
    whole: float | None = None
    for tier in federation.tiers:
        submodel = chosen(federation, spec, tier=tier, kind=None, gamma=None, options={}, weights=weights)
        if submodel.prefix and whole is not None:
            accuracies[tier] = whole
            continue
        accuracies[tier] = workshop.score(workshop.module(submodel))
        whole = accuracies[tier] if submodel.prefix else whole
    return accuracies


def _check_same(run: Path, dataset: Dataset, *, named: bool) -> None:
    """DataError unless the run's bundles were made for samples like these, or the run has none and ``named`` its data."""
    spec = next((read_bundle(path).manifest.data for path in sorted(run.glob(BUNDLES))), None)
    if spec == data_spec(dataset) or (spec is None and named):
        return
    raise DataError(
        f"the samples that are found here ({dataset.name}) are not known to be those of the run in {run}: set EDGEFL_DATA "
        "as it was for the run",
        path=str(run),
    )
