"""Model and batches of a measured training step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.errors import ModelError
from edgefl.models.losses import CrossEntropy
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.output_side.submodel import STRONG, OutputSide, tiers


def built(model: str, options: Mapping[str, Any], tier: str, length: int = 0) -> OutputSide:
    """The part of ``model`` that ``tier`` trains; ``strong`` is the whole of any model. ``length``: for samples of which no
    more tokens count (0: whole ones).

    Raises ModelError for a model, option or tier that does not exist.
    """
    presets = {"strong": STRONG} if tier == "strong" else tiers(model)
    if tier not in presets:
        raise ModelError(f"model {model!r} has no tier {tier!r}; there are: {', '.join(presets)}", tier=tier)
    spec = build_model(model, **options)
    return presets[tier].of(spec.shortened(length) if length else spec)


def read_batches(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that :func:`benchmarks.common.device_graph.write_arrays` wrote, samples and labels."""
    files = [np.load(path) for path in sorted(folder.glob("batch*.npz"))]
    return [(torch.from_numpy(file["batch.0.x"]), torch.from_numpy(file["batch.0.y"])) for file in files]


def has_plain_labels(submodel: OutputSide) -> bool:
    """Return True if the loss is plain cross entropy with one label per sample, which other trainers support."""
    spec = submodel.spec
    return spec.loss == CrossEntropy() and spec.boundary(len(spec.units)).shape != (1,)
