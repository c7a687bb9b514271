"""Choice of a submodel that fits a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from edgefl.algorithms.catalog import TCBGD
from edgefl.api.model import DataSource, Factory, Model, dataset
from edgefl.api.progress import reporting
from edgefl.api.training import Training, checked_argument, loss_of
from edgefl.objective.carrier import Thresholded
from edgefl.submodels.submodel import Submodel
from edgefl_export import fit
from edgefl_export.device import Device
from edgefl_export.offers import Fit


def plan(
    model: Model | Factory,
    device: Device = Device(),
    *,
    training: Training | Callable[[Submodel], Training] = Training(),
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    data: DataSource | None = None,
    progress: Callable[[str], None] | None = None,
    processes: int = 1,
) -> Fit:
    """Compare all submodels of a model on a device: memory, bytes and time of a round, and the recommended one.

    Args:
        model: as in :func:`edgefl.compile`.
        device: its capacity; 0 is unknown.
        training: algorithm, codec, optimizer and loss of all submodels; or a function that gives the first three for each.
            Without an algorithm SGD, and TCBGD for submodels of single entries.
        kinds: kinds of submodels; by default all.
        gammas: shares of the parameters; by default the paper's.
        data: dataset with the samples and classes of the model.
        progress: called with a text before each size, which takes some seconds; by default a line in a terminal or a
            notebook shows it.
        processes: sizes that are traced side by side, in forks of this process. If torch cannot compute in a fork, which
            depends on what this process has done before, they are traced here.

    Raises:
        ModelError: the model has no submodel at all. If none fits, ``recommended()`` of the result raises it.

    >>> fit = edgefl.plan("mlp", edgefl.Device(memory="64MiB"), kinds=["width"], gammas=[0.25, 1.0])
    >>> fit.recommended().kind
    'width'
    """
    whole = Training() if callable(training) else checked_argument("training", Training, training)
    trained = training if callable(training) else partial(_suited, training)
    with reporting("tracing and cutting the model", progress=progress) as report:
        return fit.plan(
            Model.of(model).spec(dataset(data), loss_of(whole.loss)),
            device,
            lambda submodel: trained(submodel).choices,
            kinds=kinds,
            gammas=gammas,
            on_progress=report,
            processes=processes,
        )


def _suited(training: Training, submodel: Submodel) -> Training:
    """Return ``training``; without an algorithm, with the one that makes use of a submodel's thresholds."""
    if training.algorithm is None and isinstance(submodel.carrier, Thresholded):
        return replace(training, algorithm=TCBGD())
    return training
