"""How good a global model is on the test set of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from edgefl.contract.program import Program
from edgefl.contract.tensors import arrays, prefixed, select
from edgefl.data.dataset import Dataset
from edgefl.data.text.unigram import unigram_perplexity
from edgefl.models.losses.catalog import TokenLabels
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import labels_of
from edgefl.setup.processor import processor
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.metrics import added, measured
from edgefl.wire.tensors import Array, Arrays

EVALUATION_BATCH = 500
"""Static batch norm takes its statistics from test batches; large ones are asked for (embracingfl.md 2.7)."""


def evaluation(
    spec: ModelSpec, program: Program, dataset: Dataset, device: str = "auto"
) -> Callable[[Arrays], Mapping[str, float]]:
    """``weights -> {name: value}`` on the test set, as ``program`` of the whole model has inference: the metrics of
    ``spec`` (:attr:`~edgefl.models.spec.ModelSpec.metrics`) and ``loss``."""
    where = torch.device(processor(device))
    count, label = len(dataset.test_y), spec.label.shape
    batches = np.array_split(np.arange(count), max(1, -(-count // EVALUATION_BATCH)))

    @torch.inference_mode()
    def evaluate(weights: Arrays) -> Mapping[str, float]:
        named = prefixed(
            "weights", {name: torch.from_numpy(array).to(where) for name, array in weights.items()}
        )
        sums: dict[str, Array] = {}
        for rows in batches:
            read = dataset.test_batch(rows) | {"mask": np.ones(len(rows), np.float32)}
            read[SAMPLE] = read["x"]
            read["y"] = read["y"].reshape(len(rows), *label)
            batch = {part: torch.from_numpy(array).to(where) for part, array in read.items()}
            sums = added(sums, arrays(select(program.evaluate(named | prefixed("batch.0", batch)), "metric")))
        return measured(spec.metrics, sums)

    return evaluate


def perplexity_to_beat(dataset: Dataset) -> float | None:
    """Perplexity on the test set of the unigram model of the training set, over the tokens that a language model is
    measured on; None where labels are no tokens of the samples, or there are none to learn from."""
    labels = labels_of(dataset)
    if not isinstance(labels, TokenLabels) or not len(dataset.train_y):
        return None
    parts = (dataset.train_y, dataset.test_y)
    # Where labels are the samples' own tokens, nothing says the first one.
    train, test = (each[:, 1:] if labels.are == "tokens" else each for each in parts)
    train, test = (each[each != dataset.ignored] for each in (train, test))
    return unigram_perplexity(train, test, dataset.classes)
