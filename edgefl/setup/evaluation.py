"""Evaluation of a global model on the test set of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from edgefl.config import Federation
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, arrays, prefixed, select
from edgefl.data.dataset import Dataset
from edgefl.data.text.samples import unigram_perplexity
from edgefl.models.losses.catalog import TokenLabels
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import labels_of
from edgefl.setup.processor import processor
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.statistics import StatisticsMode, estimable, unknown_statistics, with_buffers
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.metrics import add_sums, compute_metrics
from edgefl.wire.tensors import Array, Arrays

EVALUATION_BATCH = 500
"""Rows at a time, also those that statistics of batch norm are estimated from (embracingfl.md 2.7)."""
STATISTICS_ROWS = 5000
"""Most rows that statistics of batch norm are estimated from, unless a person asks for more: their error is below 2 %."""
FEW_ROWS = 32
"""An estimate from fewer rows is too rough to rely on."""

Evaluate = Callable[[Arrays], Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class StatisticsRows:
    """Rows of ``dataset`` for estimating statistics of norm layers: training rows, or test rows if there are none.

    Labels are not used. ``most`` is the largest number of rows, 0 for all.
    """

    dataset: Dataset
    most: int = STATISTICS_ROWS

    @property
    def source(self) -> Literal["training", "test"]:
        """Part of the dataset that the rows come from."""
        return "training" if len(self.dataset.train_y) else "test"

    @property
    def count(self) -> int:
        """Number of rows."""
        available = len(self.dataset.train_y) or len(self.dataset.test_y)
        return min(available, self.most or available)

    @property
    def warning(self) -> str:
        """Warning that the rows are too few for a reliable accuracy; "" if they suffice."""
        if self.count >= FEW_ROWS:
            return ""
        return (
            f"statistics of batch norm are estimated from the server's rows, expected at least {FEW_ROWS}, found "
            f"{self.count}: reported and deployed accuracy may be far too low; give the server more test samples, or let "
            "devices measure them ([evaluate] split, every)"
        )

    def batches(self) -> Iterator[Mapping[str, Array]]:
        """Yield the rows in batches of about equal size, each a mapping from input names to arrays."""
        read, labels = self.dataset.test_batch, self.dataset.test_y
        if self.source == "training":
            read, labels = self.dataset.train_batch, self.dataset.train_y
        # Shuffled: a dataset may be sorted by class, and each batch's statistics count alike.
        rows = np.random.default_rng(0).permutation(len(labels))[: self.count]
        for at in np.array_split(rows, -(-len(rows) // EVALUATION_BATCH)) if len(rows) else ():
            yield read(at)


def trains_narrow(federation: Federation) -> bool:
    """Return True if training may run norm layers on narrow or masked activations.

    Their moving statistics then do not describe the whole model. Output-side tiers train layers as in the whole
    model.
    """
    return any(tier.kind != "output_side" for tier in federation.tiers.values())


def estimated_statistics(federation: Federation, spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the buffers that are estimated from data before the whole model is evaluated.

    Return () if the moving statistics of training are valid.
    """
    return estimable(spec.module, moving=trains_narrow(federation))


def private_warning(algorithm: Algorithm) -> str:
    """Return a warning if the algorithm keeps tensors on the devices, so that only they can measure the model, or ""."""
    if not algorithm.private:
        return ""
    return (
        f"algorithm {algorithm.name!r} keeps {len(algorithm.private)} tensors on each device, such as "
        f"{min(algorithm.private)!r}, and the server's model has them untrained: its accuracy says nothing about the "
        "devices' own models, which only the devices can measure"
    )


def evaluation_warning(
    federation: Federation, spec: ModelSpec, dataset: Dataset, algorithm: Algorithm | None = None
) -> str:
    """Return a warning if the accuracy that the server reports will be unreliable, or "".

    This happens if the devices keep a part of the model, the server has too few rows, or the model has statistics that
    cannot be estimated.

    Args:
        federation: The federation.
        spec: The whole model.
        dataset: Rows of the server.
        algorithm: Local training of a tier; None if it keeps no tensors on the devices.
    """
    if algorithm is not None and (text := private_warning(algorithm)):
        return text
    rows = StatisticsRows(dataset)
    if not estimated_statistics(federation, spec):
        return ""
    if not trains_narrow(federation) or rows.count < 2:
        return rows.warning
    read = next(rows.batches())
    unknown = unknown_statistics(
        spec.module, {name: torch.from_numpy(part[:8]) for name, part in read.items()}
    )
    if not unknown:
        return rows.warning
    return (
        f"tiers of the run train narrow or masked submodels, and nothing estimates the moving statistics {unknown[0]!r} of "
        f"the whole model ({len(unknown)} such): reported and deployed accuracy may be far too low; call torch's batch_norm "
        "or instance_norm, or use group norm"
    )


def federation_evaluation(
    federation: Federation, spec: ModelSpec, dataset: Dataset, device: str = "auto"
) -> Evaluate:
    """Return a function from the weights of the whole model to its loss and metrics by name on the test set.

    Weights are converted as the algorithm runs inference. Statistics of norm layers that training does not provide
    are estimated from the server's rows, as in `edgefl deploy`.

    Args:
        federation: the federation.
        spec: its model.
        dataset: dataset with the test set.
        device: torch's device, or ``auto``.
    """
    whole = replace(spec, module=with_buffers(spec.module))
    algorithm = algorithm_of(federation, OutputSide(whole, 0))
    return evaluation(whole, algorithm, dataset, device, estimated=estimated_statistics(federation, spec))


def evaluation(
    spec: ModelSpec,
    algorithm: Algorithm,
    dataset: Dataset,
    device: str = "auto",
    *,
    estimated: Collection[str] = (),
) -> Evaluate:
    """Return a function from the weights of the whole model to its loss and metrics by name on the test set.

    Args:
        spec: the model; its metrics (:attr:`~edgefl.models.spec.ModelSpec.metrics`) and ``loss`` are computed.
        algorithm: the local training of the whole model, which defines the form of weights in inference.
        dataset: dataset with the test set.
        device: torch's device, or ``auto``.
        estimated: names of buffers of ``spec`` that are estimated from the dataset's rows, not read from the
            weights.
    """
    where = torch.device(processor(device))
    count, label = len(dataset.test_y), spec.label.shape
    batches = np.array_split(np.arange(count), max(1, -(-count // EVALUATION_BATCH)))
    buffers = {name: spec.weights[name].to(where) for name in estimated}

    def summed(tensors: Mapping[str, Tensor], read: Mapping[str, Array]) -> dict[str, Array]:
        """Return the sums of the metrics over the rows of a batch, by name.

        ``tensors``: weights by name; ``read``: parts of the batch by name.
        """
        parts = {**read, "mask": np.ones(len(read["y"]), np.float32), SAMPLE: read["x"]}
        parts["y"] = read["y"].reshape(len(read["y"]), *label)
        batch = {part: torch.from_numpy(array).to(where) for part, array in parts.items()}
        inputs = prefixed("weights", tensors) | prefixed("batch.0", batch)
        return arrays(select(algorithm.evaluate(inputs), "metric"))

    def estimates(tensors: Tensors) -> Tensors:
        recording = StatisticsMode({name: tensors[name] for name in estimated})
        for read in StatisticsRows(dataset).batches():
            with recording:
                summed(tensors, read)
        return recording.total.averages

    @torch.inference_mode()
    def evaluate(weights: Arrays) -> Mapping[str, float]:
        tensors = buffers | {name: torch.from_numpy(array).to(where) for name, array in weights.items()}
        tensors |= estimates(tensors) if estimated else {}
        sums: dict[str, Array] = {}
        for rows in batches:
            sums = add_sums(sums, summed(tensors, dataset.test_batch(rows)))
        return compute_metrics(spec.metrics, sums)

    return evaluate


def perplexity_to_beat(dataset: Dataset) -> float | None:
    """Return the perplexity of a unigram model of the training set on the test set, a baseline for language models.

    It covers the tokens on which a language model is evaluated. Return None if labels are no tokens of the samples,
    or there is no training set.
    """
    labels = labels_of(dataset)
    if not isinstance(labels, TokenLabels) or not len(dataset.train_y):
        return None
    parts = (dataset.train_y, dataset.test_y)
    # Where labels are the samples' own tokens, nothing says the first one.
    train, test = (each[:, 1:] if labels.are == "tokens" else each for each in parts)
    train, test = (each[each != dataset.ignored] for each in (train, test))
    return unigram_perplexity(train, test, dataset.classes)
