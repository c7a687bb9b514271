"""How good a global model is on the test set of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from edgefl.contract.program import Program
from edgefl.contract.tensors import prefixed
from edgefl.data.dataset import Dataset
from edgefl.setup.processor import processor
from edgefl.wire.tensors import Arrays

EVALUATION_BATCH = 500
"""Static batch norm takes its statistics from test batches; large ones are asked for (embracingfl.md 2.7)."""


def evaluation(
    program: Program, dataset: Dataset, device: str = "auto"
) -> Callable[[Arrays], Mapping[str, float]]:
    """``weights -> {"accuracy", "loss"}`` on the test set, as ``program`` of the whole model has inference."""
    where = torch.device(processor(device))
    count = len(dataset.test_y)
    batches = np.array_split(np.arange(count), max(1, -(-count // EVALUATION_BATCH)))

    @torch.inference_mode()
    def evaluate(weights: Arrays) -> Mapping[str, float]:
        named = prefixed(
            "weights", {name: torch.from_numpy(array).to(where) for name, array in weights.items()}
        )
        loss, correct = 0.0, 0.0
        for rows in batches:
            read = dataset.test_batch(rows) | {"mask": np.ones(len(rows), np.float32)}
            batch = {part: torch.from_numpy(array).to(where) for part, array in read.items()}
            metrics = program.evaluate(named | prefixed("batch.0", batch))
            loss, correct = (
                loss + float(metrics["metric.loss_sum"]),
                correct + float(metrics["metric.correct"]),
            )
        return {"accuracy": correct / count, "loss": loss / count}

    return evaluate
