"""Analyses of federations and results: heterogeneity of users, and personalization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edgefl.algorithms.personalize import STEP
from edgefl.analysis.heterogeneity.losses import DatasetShards, FlatLoss, shuffle_rows
from edgefl.analysis.heterogeneity.report import HeterogeneityReport, examine
from edgefl.analysis.heterogeneity.theory import TrainingSetting
from edgefl.analysis.personal.finished import FinishedRun
from edgefl.analysis.personal.report import EvaluationSetting as PersonalSetting
from edgefl.analysis.personal.report import PersonalReport
from edgefl.api.federation import federation_of
from edgefl.api.progress import reporting
from edgefl.api.run import Run, load_run
from edgefl.api.simulate import Simulation
from edgefl.config import Federation
from edgefl.contract.algorithm import Algorithm
from edgefl.data.partition import histograms
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.setup.data import how_spread, open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import completed, device_names
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.limits import check_seed
from edgefl.wire.tensors import Arrays
from edgefl_device.data.support import checked_protocol
from edgefl_device.round.offline import read_weights
from edgefl_export.compiler.manifest import batch_size

PROTOCOLS = ("train_support", "split_test", "paper_literal")
"""What a personalization adapts to, and what judges it."""


def heterogeneity(
    source: Run | Federation | str | Path | None = None,
    *,
    weights: str | Path | None = None,
    alpha: float | None = None,
    users: int = 5,
    devices: int = 0,
    samples: int = 0,
    data: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[str, HeterogeneityReport]:
    """Measure how users of a federation differ at one model: in labels, inputs, gradients and Hessians (per_fedavg.md
    6.6).

    Args:
        source: a run or its folder, for its trained model; a federation or its file, for the initial one; None: the
            demo.
        weights: file of weights that replaces the model's.
        alpha: inner step size; by default the algorithm's, else 0.01.
        users: number of users whose Hessians are examined, evenly spread; 0: all.
        devices: users to spread the data over; 0: as many as the tiers have.
        samples: most samples of a user; 0: all.
        data: folder with the dataset's standard files.
        progress: called with a text before each measurement; by default a line in a terminal or a notebook shows it.

    Returns:
        (title, report): one line that names model, weights, dataset and partition, and all measurements.

    Raises:
        ConfigError: there are no weights, or those of another model.
        DataError: the dataset's files are missing.
    """
    federation, own, where = _source(source, data)
    if weights is not None:
        own, where = read_weights(Path(weights)), str(weights)
    count = devices or len(device_names(completed(federation)))
    with reporting(progress=progress) as told:
        dataset = open_data(federation)
        spec = federation_model(federation, dataset)
        whole = OutputSide(spec, 0)
        rows = partition(federation, dataset, count)
        seed = federation.federation.seed
        report = examine(
            FlatLoss(Objective.of(whole), _tensors(spec.weights, own, where)),
            DatasetShards(dataset, shuffle_rows(rows, most=samples, seed=seed)),
            histograms(dataset.train_y, rows, dataset.classes),
            _setting(federation, algorithm_of(federation, whole), alpha, count),
            curved=users,
            seed=seed,
            on_progress=told,
        )
    title = f"{spec.name} ({where}) on {dataset.name}, {count} users, partition {how_spread(federation.data, dataset)}"
    return title, report


@dataclass(frozen=True)
class Personalized:
    """Result of :func:`personalize`: the names of model, algorithm and dataset, and one report for each protocol, in
    order.
    """

    model: str
    algorithm: str
    data: str
    reports: tuple[PersonalReport, ...]

    @property
    def title(self) -> str:
        return f"{self.model} by {self.algorithm} on {self.data}"


def personalize(
    run: Run | Simulation | str | Path,
    *,
    protocols: Iterable[str] = PROTOCOLS,
    steps: tuple[int, ...] = (0, 1, 2, 5, 10),
    headline: int = 1,
    alpha: float | None = None,
    batch: int = 40,
    seed: int = 0,
    data: str | Path | None = None,
) -> Personalized:
    """Adapt the model of a finished run or simulation to the data of each device, and evaluate it before and after.

    Args:
        run: a run, a simulation, or the folder of one.
        protocols: rules that choose the samples to adapt to and to evaluate on, of :data:`PROTOCOLS`.
        steps: numbers of steps after which the model is evaluated.
        headline: number of steps of the main result; it is added to ``steps``.
        alpha: size of a step; by default the algorithm's own.
        batch: samples per step.
        seed: seed of splits, batches and noise; the same seed gives all runs the same batches.
        data: folder with the dataset's standard files.

    Returns:
        For each protocol the metrics of the task over all users, before and after.

    Raises:
        ConfigError: if the run is not finished, a protocol is unknown, or the run's data are not where they were.
    """
    seed = check_seed(seed)
    folder = run.folder if isinstance(run, Run | Simulation) else Path(run)
    with reporting("reading the run and its data") as told:
        finished = FinishedRun.open(folder, Path(data) if data else None)
        size = finished.alpha if alpha is None else alpha
        reports = []
        for protocol in [checked_protocol(each) for each in protocols]:
            told(f"adapting the model to every user ({protocol})")
            reports.append(finished.report(PersonalSetting(size, steps, batch, protocol, seed, headline)))
    return Personalized(
        finished.spec.name, finished.federation.algorithm.name, finished.dataset.name, tuple(reports)
    )


def _source(
    source: Run | Federation | str | Path | None, data: str | Path | None
) -> tuple[Federation, Arrays | None, str]:
    """Return (federation, weights, description of the weights) for the argument ``source`` of :func:`heterogeneity`.

    The weights are float arrays by global name, or None for the model's initial ones. ``data`` replaces the folder of
    data.
    """
    if (
        source is None
        or isinstance(source, Federation)
        or not (isinstance(source, Run) or Path(source).is_dir())
    ):
        return federation_of(source, data=data), None, "initial weights"
    run = source if isinstance(source, Run) else load_run(source)
    return federation_of(run.path, data=data), run.model, str(run.weights)


def _setting(
    federation: Federation, algorithm: Algorithm, alpha: float | None, users: int
) -> TrainingSetting:
    own = algorithm.hyper.get("alpha", STEP) if algorithm.personalize is not None else STEP
    table, steps = federation.algorithm, algorithm.phases[0].steps
    batch = table.batch or batch_size(algorithm)
    return TrainingSetting(
        alpha=own if alpha is None else alpha,
        beta=algorithm.hyper.get("lr", STEP),
        tau=max(1, steps if table.steps is None else table.steps),
        inner=batch,
        outer=batch,
        hessian=batch,
        fraction=federation.round.fraction,
        users=users,
    )


def _tensors(initial: dict[str, Tensor], arrays: Arrays | None, where: str) -> dict[str, Tensor]:
    """Return ``arrays`` as tensors by global name, or ``initial`` if they are None.

    Raises:
        ConfigError: a weight is missing or has another shape. The text names ``where``, the origin of the arrays.
    """
    if arrays is None:
        return initial
    wrong = [n for n, t in initial.items() if n not in arrays or tuple(arrays[n].shape) != tuple(t.shape)]
    if wrong:
        raise ConfigError(
            f"{where} holds weights of another model than the federation's: {wrong[0]} is missing or of another shape; give "
            "the federation that it was trained with",
            path=where,
        )
    return {name: torch.from_numpy(arrays[name].copy()) for name in initial}
