"""Shapes of samples, for devices and for compilers."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.comparison.compare import compare
from edgefl.config import Federation
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Array, Dataset, OtherInput
from edgefl.models import losses
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import model_trained_on
from edgefl.setup.data import open_data
from edgefl.setup.model import check_fits, federation_model
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import ImageReader, Reader

_HALF_OF_8_BITS = 128


def data_spec(dataset: Dataset) -> DataSpec:
    """Return the shape, dtype and reader of the devices' samples."""
    return DataSpec(
        shape=dataset.shape,
        dtype=dataset.dtype,
        classes=dataset.classes,
        scale=float(dataset.scale),
        shift=float(dataset.shift),
        below=dataset.below,
        others=tuple(
            Input(name=name, shape=other.test.shape[1:], dtype=str(other.test.dtype), below=other.below)
            for name, other in dataset.others.items()
        ),
        names=dataset.names,
        reader=_reader(dataset),
    )


def _reader(dataset: Dataset) -> Reader | None:
    """The dataset's. Images need none, unless their numbers are not those of 8 bits: white is 16 in handwritten digits."""
    if dataset.reader is None and dataset.pixels and dataset.top < _HALF_OF_8_BITS:
        return ImageReader(white=dataset.top)
    return dataset.reader


def samples_like(federation: Federation) -> Dataset:
    """The dataset of a federation that has a table ``[data]``; else one sample of zeros and its label, as the model reads
    them by itself, with the options that it is given.

    DataError if the dataset is nowhere; ModelError for a model of one's own that does not say what it reads.
    """
    return open_data(federation) if federation.data.model_fields_set else _zeros_for(_by_itself(federation))


def model_with_samples(federation: Federation) -> tuple[ModelSpec, Dataset]:
    """Return the model of a federation, fitted to the samples that :func:`samples_like` returns, and these samples.

    A module of the user's own is cut once: without a table ``[data]`` the samples fit it as it is.
    """
    table = federation.model
    if federation.data.model_fields_set or ":" not in table.name or table.bn != "global":
        dataset = samples_like(federation)
        return federation_model(federation, dataset), dataset
    spec = _by_itself(federation)
    dataset = _zeros_for(spec)
    check_fits(spec, table.name, dataset)
    return compare(spec, dataset, federation.federation.seed), dataset


def _by_itself(federation: Federation) -> ModelSpec:
    """Return the model as it is built without data."""
    table, loss = federation.model, federation.loss
    options: dict[str, Any] = {"seed": federation.federation.seed, **table.options}
    options |= {} if table.output is None else {"output": table.output}
    return model_trained_on(
        table.name, options, losses.build(loss.name, **loss.options) if loss.name else None
    )


def _zeros_for(spec: ModelSpec) -> Dataset:
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
