"""Metrics of a model, computed from sums that are added over rows, batches and devices.

A loss lists its metrics (``LossWithMetrics`` in ``edgefl.models.losses.loss``). An evaluation returns sums (``sums_of`` in
that module), also on a device. Metrics are computed from the total alone, because the mean of several F1 values would
not be the F1 of all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgefl.errors import ModelError
from edgefl.wire.tensors import Array

Sums = Mapping[str, Array]
"""Sums by name, float64: scalars, or one entry per class."""


LOSS = "loss"

REPORT_BITS = 16
"""Binary fraction digits of a sum that a device reports: the whole number nearest to its value times 2^16."""
REPORT_LIMIT = 1 << 52
"""Magnitude of a reported sum that stands for a value that is larger or not finite. Servers refuse it."""


def add_sums(total: Sums, sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return ``total`` plus ``sums``, the sums of one more batch, by name, in float64. Change neither argument.

    A name that ``total`` lacks is taken from ``sums``; a name that ``sums`` lacks is left out.
    """
    new = {name: np.asarray(each, np.float64) for name, each in sums.items()}
    return {name: total[name] + each if name in total else each for name, each in new.items()}


def compute_metrics(names: Sequence[str], sums: Sums) -> dict[str, float]:
    """Compute metrics from sums.

    Args:
        names: Keys of :data:`METRICS`.
        sums: Sums over all rows.

    Returns:
        Values by name: the metrics in the order of ``names``, then ``loss``. NaN if a metric has no data, such as
        accuracy without a label that counts.

    Raises:
        ModelError: A name is not in :data:`METRICS`.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ModelError(f"no metric {unknown[0]!r}; there are: {', '.join(METRICS)}", unknown=unknown)
    return {name: METRICS[name](sums) for name in names} | {LOSS: mean_loss(sums)}


def mean_loss(sums: Sums) -> float:
    """Return the mean loss over all samples, weighted if the sums contain sample weights. NaN without samples.

    Args:
        sums: Sums by name: ``loss_sum`` and ``count``, or ``weighted_loss`` and ``weight``.
    """
    weighted = "weight" in sums
    return _ratio(sums["weighted_loss" if weighted else "loss_sum"], sums["weight" if weighted else "count"])


def accuracy(sums: Sums) -> float:
    """Return the share of correct predictions, from 0 to 1, weighted if the sums contain sample weights. NaN without
    samples.

    Args:
        sums: Sums by name: ``correct`` and ``count``, or ``weighted_correct`` and ``weight``.
    """
    weighted = "weight" in sums
    return _ratio(
        sums["weighted_correct" if weighted else "correct"], sums["weight" if weighted else "count"]
    )


def f1(sums: Sums) -> float:
    """Return the mean of F1 = 2 tp / (2 tp + fp + fn) over the classes that occur or are predicted, from 0 to 1.

    NaN if there is no such class. For two classes it is the F1 of the second.

    Args:
        sums: Sums by name, with ``tp``, ``fp`` and ``fn`` per class: true positives, false positives, false
            negatives.
    """
    return _mean_of_classes(2 * sums["tp"], 2 * sums["tp"] + sums["fp"] + sums["fn"])


def iou(sums: Sums) -> float:
    """Return the mean of tp / (tp + fp + fn) (intersection over union) over the classes that occur or are predicted.

    NaN if there is no such class.

    Args:
        sums: Sums by name, with ``tp``, ``fp`` and ``fn`` per class: true positives, false positives, false
            negatives.
    """
    return _mean_of_classes(sums["tp"], sums["tp"] + sums["fp"] + sums["fn"])


def perplexity(sums: Sums) -> float:
    """Return exp of the mean negative log-likelihood per token. NaN without tokens, infinity beyond exp(700).

    A uniform prediction has a perplexity equal to the size of the vocabulary.
    """
    mean = _ratio(sums["nll"], sums["tokens"])
    return math.inf if mean > 700.0 else math.exp(mean)


def mae(sums: Sums) -> float:
    """Return the mean absolute error in the unit of the labels. NaN without samples."""
    return _ratio(sums["absolute"], sums["count"])


METRICS: Mapping[str, Callable[[Sums], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "iou": iou,
    "perplexity": perplexity,
    "mae": mae,
}


def _ratio(total: Array, count: Array) -> float:
    return float(total) / float(count) if float(count) else math.nan


def _mean_of_classes(over: Array, under: Array) -> float:
    """Return the mean of ``over / under`` over the classes where ``under`` is positive, or NaN if there is none."""
    there = np.asarray(under) > 0
    return float(np.mean(over[there] / under[there])) if there.any() else math.nan
