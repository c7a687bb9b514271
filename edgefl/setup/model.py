"""Model of a federation, shapes of its samples, and submodels of its tiers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from edgefl.comparison.compare import compare
from edgefl.config import Federation, TierTable
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Array, Dataset, OtherInput
from edgefl.errors import ConfigError, ModelError
from edgefl.models import losses
from edgefl.models.losses.catalog import TokenLabels, fitting_losses
from edgefl.models.losses.classification import CausalLM
from edgefl.models.losses.loss import Loss
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import MODELS, model_trained_on
from edgefl.setup.data import open_data
from edgefl.submodels import catalog as submodels
from edgefl.submodels.submodel import Submodel
from edgefl.system.sizes import GIB
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.bundle.readers import ImageSpec, Reader

_PROCESS_BYTES, _PROCESS_SHARE = GIB, 24


@runtime_checkable
class SelfCheckingSubmodel(Protocol):
    """Interface of a submodel that can predict if training from given weights will learn."""

    def warnings(self, weights: Mapping[str, Array]) -> tuple[str, ...]:
        """Return warnings about training that starts from the initial weights ``weights``."""


def process_bytes(spec: ModelSpec) -> int:
    """Return the estimated memory in bytes of a process that compiles: torch, graphs, copies of weights and activations."""
    return _PROCESS_BYTES + _PROCESS_SHARE * sum(tensor.nbytes for tensor in spec.weights.values())


def federation_model(federation: Federation, dataset: Dataset) -> ModelSpec:
    """Return the federation's model, fitted to the samples and classes of ``dataset``. Its seed determines the initial
    weights.

    Raises:
        ConfigError: if model, batch norm mode and data do not fit together.
        ModelError: if the model cannot be built or cut.
    """
    table, loss = federation.model, federation.loss
    return fitted_model(
        table.name,
        dataset,
        bn=table.bn,
        seed=federation.federation.seed,
        options=table.options | ({} if table.output is None else {"output": table.output}),
        loss=losses.build(loss.name, **loss.options) if loss.name else None,
    )


def fitted_model(
    name: str,
    dataset: Dataset,
    *,
    bn: str = "global",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
) -> ModelSpec:
    """Build a model that fits the samples and classes of ``dataset``.

    Args:
        name: name of the model, or ``file.py:factory``.
        dataset: the samples.
        bn: mode of batch norm.
        seed: seed of the initial weights.
        options: options of the factory.
        loss: loss of the training; None: the model's own, or the one that fits its output and the labels.

    Raises:
        ConfigError: if model, batch norm mode and data do not fit together.
        ModelError: if the model cannot be built or cut.
    """
    offered = _data_arguments(dataset)
    factory = MODELS.get(name)
    if factory is None:
        offered |= {"sample_shape": sample_of(dataset)}  # an image need not be square
    else:
        accepted = inspect.signature(factory).parameters
        offered = {key: value for key, value in offered.items() if key in accepted}
        if "bn" in accepted:
            offered["bn"] = bn
    if bn != "global" and "bn" not in offered:
        raise ConfigError(
            f"model.bn is {bn!r}, and model {name!r} has no batch norm mode: remove model.bn, or choose "
            "a model that has one (a factory of your own takes what it needs from model.options)",
            model=name,
            bn=bn,
        )
    spec = model_trained_on(name, {**offered, "seed": seed, **(options or {})}, loss, labels_of(dataset))
    check_fits(spec, name, dataset)
    return compare(spec, dataset, seed)


def _data_arguments(dataset: Dataset) -> dict[str, Any]:
    """Return the arguments about the data that a factory may take, by name: the size of a sample, and ``classes``.

    For regression, ``classes`` is the number of values in a label.
    """
    labels = dataset.test_y
    outputs = (*labels.shape[1:], 1)[0] if labels.dtype.kind == "f" else dataset.classes
    if dataset.below:
        layout = {"length": dataset.shape[0], "vocabulary": dataset.below}
    elif len(dataset.shape) == 3:
        layout = {"in_channels": dataset.shape[0], "size": dataset.shape[1]}
    else:
        layout = {"features": dataset.shape[-1]}
    return layout | {"classes": outputs}


def sample_of(dataset: Dataset) -> tuple[int, ...] | TensorSpec | dict[str, TensorSpec]:
    """Return the shape of a sample as a factory of models takes it.

    It is a tuple for float32, a TensorSpec for tokens, and a mapping from input names to TensorSpecs if there are
    further inputs.
    """
    x = TensorSpec(dataset.shape, getattr(torch, dataset.dtype), dataset.below or None)
    if dataset.others:
        return {"x": x} | {name: _spec(other) for name, other in dataset.others.items()}
    return x if dataset.below else dataset.shape


def _spec(other: OtherInput) -> TensorSpec:
    dtype = torch.from_numpy(other.test[:0]).dtype
    return TensorSpec(other.test.shape[1:], dtype, other.below or None)


def check_fits(spec: ModelSpec, model: str, dataset: Dataset) -> None:
    """Check that the model reads the dataset's samples and trains on its labels.

    Args:
        spec: the model.
        model: its name, for the error.
        dataset: the samples.

    Raises:
        ConfigError: if it does not.
    """
    dtype = str(spec.sample.dtype).removeprefix("torch.")
    label, labels = spec.label, labels_of(dataset)
    of_classes = not labels.dtype.is_floating_point
    classes = dataset.classes if of_classes else spec.classes
    if (spec.sample.shape, dtype, spec.classes) != (dataset.shape, dataset.dtype, classes):
        raise ConfigError(
            f"model {model!r} takes samples of shape {spec.sample.shape} ({dtype}) in {spec.classes} classes, "
            f"{dataset.name} has {dataset.shape} ({dataset.dtype}) in {dataset.classes}: {_remedy(dataset)}",
            model=model,
            data=dataset.name,
        )
    if dataset.below > (spec.sample.below or dataset.below):
        raise ConfigError(
            f"model {model!r} has a vocabulary of {spec.sample.below} tokens, {dataset.name} one of {dataset.below}: "
            "change model.options",
            model=model,
        )
    for name, wanted in spec.others.items():
        found = dataset.others.get(name)
        if found is None or _spec(found).shape != wanted.shape or _spec(found).dtype != wanted.dtype:
            there = ", ".join(f"{each} {_spec(other).shape}" for each, other in dataset.others.items())
            raise ConfigError(
                f"model {model!r} reads {name} {wanted.shape} ({wanted.dtype}) of each sample, {dataset.name} has "
                f"{there or 'nothing beside x'}: add it to the data",
                model=model,
            )
    alike = label.shape == labels.shape or (label.shape, labels.shape) == ((1,), ())
    if not alike or label.dtype.is_floating_point == of_classes:
        names = ", ".join(fitting_losses(spec.boundary(len(spec.units)), labels, spec.sample))
        raise ConfigError(
            f"model {model!r} is trained on labels of shape {label.shape} and type {label.dtype}, {dataset.name} has "
            f"{_describe(labels)} per sample: choose the loss that fits ({names or 'none of edgefl does'}), or another "
            "model",
            model=model,
        )

    if isinstance(labels, TokenLabels) and isinstance(spec.loss, CausalLM):
        _check_shift(spec.loss, model, dataset, labels)
    if labels.ignored is not None and labels.ignored != label.ignored:
        raise ConfigError(
            f"labels {labels.ignored} of {dataset.name} count for nothing, and the loss of {model!r} would count them: "
            f"give it ignore_index = {labels.ignored} (loss.options)",
            model=model,
        )


def _remedy(dataset: Dataset) -> str:
    if len(dataset.shape) == 1 and not dataset.below:
        return (
            f"give a model of your own that takes {dataset.shape[0]} numbers (file.py:factory, as in the guide to data, "
            '"One CSV file"), or other data'
        )
    return "change model.options or data.name"


def labels_of(dataset: Dataset) -> TensorSpec:
    """Return shape and dtype of one label: int64 for classes and tokens, float32 for other numbers.

    Labels that are the sample's own tokens, or its next tokens, are returned as TokenLabels.
    """
    shape = tuple(dataset.test_y.shape[1:])
    if dataset.test_y.dtype.kind == "f":
        return TensorSpec(shape, torch.float32)
    spec = TensorSpec(shape, torch.int64, dataset.classes, dataset.ignored)
    x, y = dataset.test_x, dataset.test_y
    if not dataset.below or x.shape != y.shape or x.ndim != 2 or x.shape[1] < 2:
        return spec
    counted = np.ones(y.shape, bool) if dataset.ignored is None else y != dataset.ignored
    tokens = bool((x == y)[counted].all())
    following = bool((x[:, 1:] == y[:, :-1])[counted[:, :-1]].all())
    if tokens == following:  # neither, or tokens that are all alike
        return spec
    return TokenLabels(shape, spec.dtype, spec.below, spec.ignored, "tokens" if tokens else "next")


def _check_shift(loss: CausalLM, model: str, dataset: Dataset, labels: TokenLabels) -> None:
    """Raise ConfigError if the loss shifts labels that are shifted already, or does not shift labels that are not."""
    if loss.shift == (labels.are == "tokens"):
        return
    there, learned = ("the tokens themselves", "to repeat each token")
    if loss.shift:
        there, learned = ("already the tokens that follow", "the token after the next one")
    raise ConfigError(
        f"the labels of {dataset.name} are {there}, and with shift = {str(loss.shift).lower()} model {model!r} would learn "
        f"{learned}: set shift = {str(not loss.shift).lower()} (loss.options)",
        model=model,
    )


def _describe(labels: TensorSpec) -> str:
    if labels.dtype.is_floating_point:
        return f"numbers of shape {labels.shape}"
    return f"class numbers of shape {labels.shape}" if labels.shape else "one class number"


def submodel_of(spec: ModelSpec, tier: str, table: TierTable) -> Submodel:
    """Return the submodel that the table of a tier describes.

    Args:
        spec: the model.
        tier: name of the tier, for errors.
        table: its table in the federation file.

    Raises:
        ConfigError: if the model has no such submodel; the message begins with the tier's name.
        ModelError: the same, if the model itself is at fault.
    """
    with naming_tier(tier):
        return submodels.build(spec, table.kind, **table.submodel)


@contextmanager
def naming_tier(tier: str) -> Iterator[None]:
    """Open a context that puts the tier's name before the message of each ConfigError and ModelError."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(f"tier {tier!r}: {error.message}", **error.details) from error


def submodel_warnings(submodel: Submodel, tier: str, initial: Mapping[str, Array]) -> Iterator[str]:
    """Yield warnings, with the tier's name, if training from the weights ``initial`` may not learn."""
    if isinstance(submodel, SelfCheckingSubmodel):
        for text in submodel.warnings(initial):
            yield f"tier {tier!r}: {text}"


_HALF_OF_8_BITS = 128


def data_spec(dataset: Dataset) -> DataSpec:
    """Return the description of the devices' samples for a manifest: shape, dtype, scale, further inputs and reader."""
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
        reader=_reader_of(dataset),
    )


def _reader_of(dataset: Dataset) -> Reader | None:
    """Return the settings that turn a device's files into samples; None if the defaults suffice.

    Images need settings only if a white pixel is not 255, such as 16 in handwritten digits.
    """
    if dataset.reader is None and dataset.pixels and dataset.top < _HALF_OF_8_BITS:
        return ImageSpec(white=dataset.top)
    return dataset.reader


def samples_like(federation: Federation) -> Dataset:
    """Return the dataset of a federation with a table ``[data]``. Without one, return one sample of zeros that fits the
    model.

    Raises:
        DataError: if the dataset's files are missing.
        ModelError: if there is no dataset, and the user's own model does not define its inputs.
    """
    return open_data(federation) if federation.data.model_fields_set else _zeros_for(_by_itself(federation))


def model_with_samples(federation: Federation) -> tuple[ModelSpec, Dataset]:
    """Return (model of a federation, samples that it is fitted to), the samples as in :func:`samples_like`.

    A module of the user's own is cut into units (stages of the model) only once: without a table ``[data]``, the
    samples are made to fit it.

    Raises:
        DataError: if the dataset's files are missing.
        ModelError: if the model cannot be built or cut, or does not define its inputs.
        ConfigError: if model and data do not fit together.
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
    """Return the federation's model with its default sample shape, independent of data."""
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
