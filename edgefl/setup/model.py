"""The model of a federation and what each tier holds of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from edgefl.config import Federation, TierTable
from edgefl.data.dataset import Dataset
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import MODELS, build_model
from edgefl.submodels import catalog as submodels
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError, ModelError
from edgefl.wire.tensors import Array


@runtime_checkable
class SelfChecking(Protocol):
    """A submodel that finds out by itself whether it can learn."""

    def warnings(self, weights: Mapping[str, Array]) -> tuple[str, ...]:
        """What a person should know before it is trained from these initial weights."""
        ...


def federation_model(federation: Federation, dataset: Dataset) -> ModelSpec:
    """The model with initial weights by seed, fitted to the images and classes of ``dataset``."""
    table = federation.model
    return fitted_model(
        table.name, dataset, bn=table.bn, seed=federation.federation.seed, options=table.options
    )


def fitted_model(
    name: str,
    dataset: Dataset,
    *,
    bn: str = "global",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The model ``name`` with initial weights by ``seed``, fitted to the images and classes of ``dataset``.

    ConfigError where the model, its batch norm mode ``bn`` and the data do not go together.
    """
    channels, height, _ = dataset.shape
    offered: dict[str, Any] = {"in_channels": channels, "size": height, "classes": dataset.classes}
    factory = MODELS.get(name)
    if factory is None:
        offered["sample_shape"] = dataset.shape  # which need not be square
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
        )
    spec = build_model(name, **{**offered, "seed": seed, **(options or {})})
    check_fits(spec, name, dataset)
    return spec


def check_fits(spec: ModelSpec, model: str, dataset: Dataset) -> None:
    """ConfigError if the model does not read such samples, or is not trained on such labels."""
    if spec.sample.shape != dataset.shape or spec.classes != dataset.classes:
        raise ConfigError(
            f"model {model!r} takes samples of shape {spec.sample.shape} in {spec.classes} classes, "
            f"{dataset.name} has {dataset.shape} in {dataset.classes}: change model.options or data.name",
            model=model,
        )
    if spec.label.shape or spec.label.dtype.is_floating_point:
        raise ConfigError(
            f"model {model!r} is trained on labels of shape {spec.label.shape} and type {spec.label.dtype}, "
            f"{dataset.name} has one class number per sample: choose a model that classifies, or its loss",
            model=model,
        )


def submodel_of(spec: ModelSpec, tier: str, table: TierTable) -> Submodel:
    """What devices of a tier hold of ``spec``; ConfigError or ModelError that begins with the tier's name."""
    try:
        return submodels.build(spec, table.kind, **table.submodel)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"tier {tier!r}: {error.message}", **error.details) from error


def submodel_warnings(submodel: Submodel, tier: str, initial: Mapping[str, Array]) -> Iterator[str]:
    """What a person should know about a tier before it is trained; none of it stops a run."""
    if isinstance(submodel, SelfChecking):
        for text in submodel.warnings(initial):
            yield f"tier {tier!r}: {text}"
