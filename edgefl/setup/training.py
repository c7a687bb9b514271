"""Training of the tiers of a federation: algorithm, codec and optimizer, and the rounds that they allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgefl.algorithms.activations import stored
from edgefl.codecs import catalog as codecs
from edgefl.comparison.compare import compare
from edgefl.config import Federation, TierTable
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import MEAN
from edgefl.facts.combinations import combination_error
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import submodel_of
from edgefl.submodels.submodel import Submodel
from edgefl_export.compiler.algorithm import coded_algorithm, trained_by, with_shorter
from edgefl_export.compiler.request import TierTraining


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


def tier_of(federation: Federation, spec: ModelSpec, name: str) -> TierTraining:
    """The tier ``name`` with its algorithm. ConfigError or ModelError where model, kind, algorithm or codec do not go
    together."""
    table = tier_tables(federation)[name]
    submodel = submodel_of(spec, name, table)
    shorter = {
        length: algorithm_of(federation, submodel_of(compare(spec.shortened(length)), name, table))
        for length in federation.data.lengths
    }
    algorithm = with_shorter(algorithm_of(federation, submodel), shorter)
    return TierTraining(name, submodel, stored(algorithm, table.activations))


def tiers_of(federation: Federation, spec: ModelSpec, names: Collection[str] = ()) -> dict[str, TierTraining]:
    """All tiers, or those in ``names``, in the order of the file: see :func:`tier_of`."""
    tables = tier_tables(federation)
    return {name: tier_of(federation, spec, name) for name in tables if not names or name in names}


def why_not(method: Algorithm) -> str:
    """Return the reason why devices of ``method`` cannot begin from several versions of the model; empty if they can.

    An update must be a change of the weights that is valid whatever the other devices began from. Its inputs must be in the
    weights of its version, or be the device's own.
    """
    if method.whole:
        return "it needs every device in every round, and no round waits for any"
    if len(method.exchanges) > 1:
        return f"it has {len(method.exchanges)} exchanges in turn, and devices would be in several of them at a time"
    if method.server.unfold is not MEAN.unfold:
        return "the server averages something else than what devices send, which holds for one version of it"
    if (shared := _shared(method)) != ():
        return f"devices read the server's {', '.join(shared)} beside the weights, which belongs to one version of them"
    if method.carry_rule.needed or method.carry_rule.exchanges:
        return "what a device keeps is good for the next round only, and versions come and go meanwhile"
    return ""


def check_versions(method: Algorithm) -> None:
    """ConfigError with the reason where devices of ``method`` cannot begin from several versions at a time."""
    if why := why_not(method):
        raise combination_error(
            f"algorithm {method.name!r} does not go with round.mode buffered: {why}; choose round.mode synchronous, or "
            "another algorithm",
            algorithm=method.name,
            mode="buffered",
        )


def _shared(method: Algorithm) -> tuple[str, ...]:
    """The server's states that devices read, or that only devices could fill."""
    names = [name for function in method.functions for name in function.inputs if name.startswith("weights.")]
    read = server_state.states_of([name.removeprefix("weights.") for name in names], method.server_state)
    return tuple(name for name in read if name != server_state.WEIGHTS)
