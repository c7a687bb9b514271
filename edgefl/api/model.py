"""Models of the API, converted to the compiler's :class:`~edgefl.models.spec.ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgefl.comparison.compare import compare
from edgefl.config import DataTable, Federation, parse
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.models.losses.loss import Loss
from edgefl.models.partition.output import Output
from edgefl.models.spec import ModelSpec
from edgefl.models.split import check_classes, split
from edgefl.models.user_factory import factory_of
from edgefl.models.zoo.catalog import build_from_factory, model_trained_on, with_loss
from edgefl.setup.data import data_table, open_data
from edgefl.setup.model import check_fits, data_spec, fitted_model, labels_of, sample_of
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.limits import check_seed

Factory = str | nn.Module | ModelSpec | Callable[..., Any]
"""The name of a model that edgefl brings, ``file.py:factory``, a module, a factory of one, or a :class:`ModelSpec`."""

Sample = Sequence[int] | TensorSpec | Mapping[str, TensorSpec]
"""The shape of one sample without batch dimension (float32), or its shape and dtype, or those of several inputs by the
names that forward gives them."""

DataSource = Dataset | DataTable | str | Path
"""A dataset, or what a federation names one by: a name, a file, or its table."""


@dataclass(frozen=True)
class Model:
    """Model: its factory, the factory's options, and the shape of its inputs.

    Attributes:
        factory: A model's name (``edgefl.catalog("models")``), ``file.py:factory``, an ``nn.Module``, a factory
            of one, or a :class:`edgefl.submodels.ModelSpec`.
        sample: Shape of one sample, without batch dimension (float32), or a :class:`edgefl.submodels.TensorSpec`.
            Only if there are no data.
        classes: Number of classes. Only if there are no data.
        options: Keyword arguments of the factory.
        output: Output that is trained, if the model returns several: a key, an attribute or a position; by
            default ``logits``, or else the first tensor of floats.
        seed: Seed of the initial weights.
    """

    factory: Factory
    _: KW_ONLY
    sample: Sample | None = None
    classes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    output: Output = None
    seed: int = 0

    @classmethod
    def of(cls, model: Model | Factory) -> Model:
        """Return ``model`` itself if it is a Model, else a Model with that factory and default settings."""
        return model if isinstance(model, Model) else cls(model)

    def spec(self, data: Dataset | None = None, loss: Loss | None = None) -> ModelSpec:
        """Build the model and return it cut into units (stages that are never split).

        Args:
            data: dataset with the shape of a sample and the number of classes; None if :attr:`sample` and
                :attr:`classes` are set, or the model is one that edgefl brings.
            loss: loss of the training; None for the model's own, or the one that fits.

        Raises:
            ConfigError: an argument is missing or has no effect; the message names it.
            ModelError: the model cannot be built or cut, or would not be trained as torch trains it.
        """
        return model_spec(
            self.factory,
            data=data,
            sample=self.sample,
            classes=self.classes,
            seed=self.seed,
            options=self.options or None,
            loss=loss,
            output=self.output,
        )


def dataset(data: DataSource | None) -> Dataset | None:
    """Return the dataset that the argument ``data`` of an API function names. A dataset and None are returned unchanged.

    Raises:
        DataError: its files are missing.
        ConfigError: the argument names no dataset.
    """
    if data is None or isinstance(data, Dataset):
        return data
    if isinstance(data, DataTable):
        return open_data(Federation(data=data))
    return open_data(parse({"data": data_table(data)}, source="argument `data`"))


def model_spec(
    model: Factory,
    *,
    data: Dataset | None = None,
    sample: Sample | None = None,
    classes: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    output: Output = None,
) -> ModelSpec:
    """Return ``model`` built and cut into units (stages that are never split).

    Args:
        model: a name, ``file.py:factory``, a module, a factory, or a ModelSpec, whose units are kept.
        data: dataset with the shape of a sample and the number of classes.
        sample: shape of a sample, without ``data``; None for a model that edgefl brings.
        classes: number of classes, without ``data``.
        seed: seed of the initial weights of a model that is built here.
        options: options of the model's factory.
        loss: loss of the training; None for the model's own, or the one that fits.
        output: name or number of the output that is trained, for a model with several.

    Raises:
        ConfigError: an argument is missing or has no effect; the message names it.
        ModelError: the model cannot be built or cut, or would not be trained as torch trains it
            (:func:`edgefl.comparison.compare.compare`).
    """
    seed = check_seed(seed)
    given = {"sample": sample, "classes": classes, "options": options or None, "output": output}
    _check_used(model, data, given)
    if not isinstance(model, nn.Module) and output is not None:
        options = {**(options or {}), "output": output}
    if isinstance(model, str) and data is not None:
        return fitted_model(model, data, seed=seed, options=options, loss=loss)
    labels = None if data is None else labels_of(data)
    if isinstance(model, str) and ":" not in model:
        counted = {} if classes is None else {"classes": classes}
        return model_trained_on(model, {"seed": seed, **counted, **(options or {})}, loss)
    if isinstance(model, ModelSpec):
        spec = with_loss(model, loss, labels)
        check_classes(spec)
    elif isinstance(model, nn.Module):
        shape, count = _shape_of(data, sample, classes)
        name = type(model).__name__.lower()
        spec = split(model, sample=shape, classes=count, name=name, loss=loss, labels=labels, output=output)
    else:
        if isinstance(model, str):
            factory_of(model, "model")  # report a wrong name before a missing shape
        shape, count = _shape_of(data, sample, classes)
        layout = {"sample_shape": shape, "classes": count, "seed": seed, **(options or {})}
        spec = (
            model_trained_on(model, layout, loss)
            if isinstance(model, str)
            else build_from_factory(
                model, getattr(model, "__name__", type(model).__name__), layout, loss, labels
            )
        )
    if data is not None:
        check_fits(spec, spec.name, data)
    return compare(spec, data, seed)


def sample_spec(spec: ModelSpec, data: Dataset | None) -> DataSpec:
    """Return shape, dtype and classes of the devices' samples: those of ``data``, or if it is None those the model
    reads.
    """
    if data is not None:
        return data_spec(data)
    others = tuple(
        Input(name=name, shape=each.shape, dtype=_dtype(each), below=each.below or 0)
        for name, each in spec.others.items()
    )
    sample = spec.sample
    return DataSpec(
        shape=sample.shape, dtype=_dtype(sample), classes=spec.classes, below=sample.below or 0, others=others
    )


def _dtype(sample: TensorSpec) -> str:
    return str(sample.dtype).removeprefix("torch.")


def _check_used(model: Factory, data: Dataset | None, given: Mapping[str, object]) -> None:
    """Raise ConfigError for an argument in ``given`` that is not None and would have no effect with this model and data."""
    reasons: dict[str, str] = {}
    if data is not None:
        reasons |= dict.fromkeys(("sample", "classes"), "`data` says that")
    if isinstance(model, str) and ":" not in model:
        reasons.setdefault(
            "sample", f"model {model!r} brings its own: give `data`, or `options` of the model"
        )
        reasons["output"] = f"model {model!r} returns one tensor"
    if isinstance(model, ModelSpec):
        reasons |= dict.fromkeys(("sample", "classes", "output"), "the ModelSpec says that")
    if isinstance(model, nn.Module | ModelSpec):
        reasons["options"] = "they go to a factory, and the model is made already"
    for name, reason in reasons.items():
        if given[name] is not None:
            raise ConfigError(f"argument `{name}` has no effect here: {reason}; leave it out", argument=name)


def _shape_of(
    data: Dataset | None, sample: Sample | None, classes: int | None
) -> tuple[TensorSpec | Mapping[str, TensorSpec], int]:
    if data is not None:
        read = sample_of(data)
        return read if isinstance(read, TensorSpec | Mapping) else TensorSpec(read), data.classes
    missing = [name for name, value in (("sample", sample), ("classes", classes)) if value is None]
    if missing:
        raise ConfigError(
            f"argument {missing[0]!r} is missing: a model of your own needs `data`, or `sample` (the shape of one sample, "
            "such as (1, 28, 28)) and `classes`",
            argument=missing[0],
        )
    assert sample is not None and classes is not None
    whole = sample if isinstance(sample, TensorSpec | Mapping) else TensorSpec(tuple(sample), torch.float32)
    return whole, classes
