"""Size of the updates of a federation's tiers, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.config import Federation
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import role_of, select
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ModelError
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import federation_model, submodel_of
from edgefl.setup.training import algorithm_of
from edgefl.submodels.submodel import Submodel
from edgefl.wire.regions import local_shape, pieces
from edgefl.wire.update.form import UpdateSize, update_size


def tier_sizes(
    federation: Federation, spec: ModelSpec, submodels: Mapping[str, Submodel]
) -> dict[str, UpdateSize]:
    """The size of an update, by tier. ConfigError or ModelError, which begins with the tier's name, where codec, algorithm
    and kind do not go together."""
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    shapes = {name: array.shape for name, array in weights.items()}
    trained = {name for name, _ in spec.module.named_parameters(remove_duplicate=False)}
    by_tier = {}
    for tier, submodel in submodels.items():
        algorithm = _algorithm(federation, submodel, tier)
        regions = submodel.place(weights, 1).regions
        statistics = {
            name
            for name, region in regions.items()
            if not any(part in trained for part, _ in pieces(name, region, shapes))
        }
        local = _sent(algorithm)
        if local is None:
            local = {name: local_shape(name, region, shapes) for name, region in regions.items()}
        by_tier[tier] = update_size(algorithm.form, local, statistics)
    return by_tier


def _sent(algorithm: Algorithm) -> dict[str, tuple[int, ...]] | None:
    """The tensors of an update that holds more than weights, or less; None where it is the weights, in whatever form."""
    ports = (*algorithm.start.inputs, *algorithm.finish.inputs)
    if algorithm.form.sections or not (
        algorithm.server_state or any(role_of(name) == "carry" for name in ports)
    ):
        return None
    update = select(algorithm.finish(algorithm.finish.example(0)), "update")
    return {name: tuple(tensor.shape) for name, tensor in update.items()}


def update_sizes(federation: Federation, dataset: Dataset) -> dict[str, UpdateSize]:
    """Return the size of an update of each tier, for the federation's own model and tiers on ``dataset``."""
    spec = federation_model(federation, dataset)
    return tier_sizes(
        federation, spec, {tier: submodel_of(spec, tier, table) for tier, table in federation.tiers.items()}
    )


def _algorithm(federation: Federation, submodel: Submodel, tier: str) -> Algorithm:
    try:
        return algorithm_of(federation, submodel)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"tier {tier!r}: {error.message}", **error.details) from error
