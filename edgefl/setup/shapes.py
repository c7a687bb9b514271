"""What samples look like for whoever compiles and needs none: as the federation says, never as what this machine has."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.config import Federation
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Array, Dataset, OtherInput
from edgefl.models import losses
from edgefl.models.zoo.catalog import model_trained_on
from edgefl.setup.data import open_data


def samples_like(federation: Federation) -> Dataset:
    """The dataset of a federation that has a table ``[data]``; else one sample of zeros and its label, as the model reads
    them by itself, with the options that it is given.

    DataError if the dataset is nowhere; ModelError for a model of one's own that does not say what it reads.
    """
    return open_data(federation) if federation.data.model_fields_set else _own(federation)


def _own(federation: Federation) -> Dataset:
    table, loss = federation.model, federation.loss
    options: dict[str, Any] = {"seed": federation.federation.seed, **table.options}
    options |= {} if table.output is None else {"output": table.output}
    spec = model_trained_on(
        table.name, options, losses.build(loss.name, **loss.options) if loss.name else None
    )
    label = spec.label  # found by a run of the model
    x, y = _zeros(spec.sample), _zeros(label)
    rows = {name: _zeros(each) for name, each in spec.others.items()}
    return Dataset(
        name=f"its own input {spec.sample.shape}",
        train_x=x,
        train_y=y,
        test_x=x,
        test_y=y,
        scale=1.0,
        shift=0.0,
        classes=spec.classes,
        below=spec.sample.below or 0,
        others={
            name: OtherInput(rows[name], rows[name], each.below or 0) for name, each in spec.others.items()
        },
        ignored=label.ignored,
    )


def _zeros(spec: TensorSpec) -> Array:
    return np.zeros((1, *spec.shape), str(spec.dtype).removeprefix("torch."))
