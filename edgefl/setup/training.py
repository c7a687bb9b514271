"""Training of the tiers of a federation: algorithm, codec and optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgefl.algorithms.activations import stored
from edgefl.codecs import catalog as codecs
from edgefl.comparison.compare import compared
from edgefl.config import Federation, TierTable
from edgefl.contract.algorithm import Algorithm
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import submodel_of
from edgefl.submodels.submodel import Submodel
from edgefl_export.front.algorithm import coded_algorithm, trained_by, with_shorter
from edgefl_export.front.tier import Tier


def algorithm_of(federation: Federation, submodel: Submodel) -> Algorithm:
    """The local training of a submodel, its update coded. ConfigError where algorithm, codec and kind do not go together."""
    table, optimizer = federation.algorithm, federation.optimizer
    return coded_algorithm(
        submodel,
        table.name,
        table.arguments,
        codecs.build(federation.codec.name, **federation.codec.options),
        optimizer=optimizer.name,
        optimizer_options=optimizer.options,
    )


def replaced_algorithm(federation: Federation) -> str:
    """Return a text about a codec that replaces the federation's algorithm by its own training, or an empty one."""
    codec, name = codecs.build(federation.codec.name, **federation.codec.options), federation.algorithm.name
    trained_with, _ = trained_by(codec, name, {})
    if trained_with == name:
        return ""
    return (
        f"codec {codec.name!r} belongs to a local training of its own: devices train with algorithm "
        f"{trained_with!r} in place "
        f"of {name!r}"
    )


def tier_tables(federation: Federation) -> Mapping[str, TierTable]:
    """The tiers of a federation; one named ``strong``, with the whole model, where the file has none."""
    return federation.tiers or {"strong": TierTable()}


def tier_of(federation: Federation, spec: ModelSpec, name: str) -> Tier:
    """The tier ``name`` with its algorithm. ConfigError or ModelError where model, kind, algorithm or codec do not go
    together."""
    table = tier_tables(federation)[name]
    submodel = submodel_of(spec, name, table)
    shorter = {
        length: algorithm_of(federation, submodel_of(compared(spec.shortened(length)), name, table))
        for length in federation.data.lengths
    }
    algorithm = with_shorter(algorithm_of(federation, submodel), shorter)
    return Tier(name, submodel, stored(algorithm, table.activations))


def tiers_of(federation: Federation, spec: ModelSpec, names: Collection[str] = ()) -> dict[str, Tier]:
    """All tiers, or those in ``names``, in the order of the file: see :func:`tier_of`."""
    tables = tier_tables(federation)
    return {name: tier_of(federation, spec, name) for name in tables if not names or name in names}
