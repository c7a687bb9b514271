"""The candidate of a rollout: from a federation file to tiers whose updates go into the same sums, or why they cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from edgefl.config import Federation, parse
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError, ModelError
from edgefl.models.spec import ModelSpec
from edgefl.setup.training import tier_tables, tiers_of
from edgefl.wire.tensors import Arrays
from edgefl_export.compiler.request import TierTraining

# The weights of a model as a server averages them.


def arrays_of(spec: ModelSpec, *, rounded: bool) -> Arrays:
    """Return the initial weights by global name.

    Raises:
        ModelError: a tensor cannot be averaged or, if ``rounded``, not be rounded for the downlink.
    """
    for name, tensor in spec.weights.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only floats can be averaged: "
                "register it as a buffer with persistent=False",
                name=name,
            )
        if rounded and tensor.dtype != torch.float32:
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only float32 can be rounded on its way to devices: "
                "make the model float32, or set downlink.encoding to 'float32'",
                name=name,
            )
        if "~" in name or "/" in name:
            raise ModelError(
                f"tensor {name} of {spec.name} has '~' or '/' in its name, which are reserved in blobs and for the server's "
                "state: rename the module or parameter",
                name=name,
            )
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in spec.weights.items()}


def candidate_of(federation: Federation) -> Federation:
    """The federation as it would be with the candidate in place; an algorithm of another name has its own options only.

    ConfigError names a key that cannot be used."""
    tables = federation.model_dump(mode="json", exclude_unset=True)
    table = federation.rollout
    tables.pop("rollout", None)
    same = table.algorithm.get("name", federation.algorithm.name) == federation.algorithm.name
    tables["algorithm"] = {**(tables.get("algorithm", {}) if same else {}), **table.algorithm}
    for name, each in table.tiers.items():
        changes = each.model_dump(mode="json", exclude_none=True)
        tables.setdefault("tiers", {})[name] = {**tables.get("tiers", {}).get(name, {}), **changes}
    return parse(tables, source="the candidate of [rollout]")


def candidates_of(
    federation: Federation, spec: ModelSpec, tiers: Mapping[str, TierTraining]
) -> dict[str, TierTraining]:
    """The candidate of each tier that has one; none without a rollout. ConfigError if its updates would be others than
    those of ``tiers``, or mean something else."""
    if not federation.rollout.on:
        return {}
    if not tried_tiers(federation):
        raise ConfigError(
            f"rollout.tiers has {', '.join(federation.rollout.tiers)}, and the only tier is strong: use its name"
        )
    candidates = tiers_of(candidate_of(federation), spec, tried_tiers(federation))
    for name, candidate in candidates.items():
        _check(name, tiers[name].algorithm, candidate.algorithm)
    return candidates


def tried_tiers(federation: Federation) -> tuple[str, ...]:
    """The tiers that have a candidate."""
    table, tiers = federation.rollout, tier_tables(federation)
    return tuple(tiers) if table.algorithm else tuple(name for name in tiers if name in table.tiers)


def _check(tier: str, algorithm: Algorithm, candidate: Algorithm) -> None:
    """Raise ConfigError unless the candidate's server side equals that of the algorithm: one server serves both."""
    if algorithm.whole or candidate.whole:
        raise refused(
            tier, "its algorithm needs every device in every round, and a trial compares some with others"
        )
    if len(algorithm.exchanges) != len(candidate.exchanges):
        raise refused(tier, "it has another number of exchanges")
    for ours, theirs in zip(algorithm.exchanges, candidate.exchanges, strict=True):
        if ours.form != theirs.form:
            raise refused(tier, "its updates have another form on the wire, and go into the same sums")
        if ours.server.name != theirs.server.name or dict(ours.server.state) != dict(theirs.server.state):
            raise refused(
                tier,
                f"the server's step is {theirs.server.name} for it, and {ours.server.name} for the others",
            )
        if dict(ours.hyper) != dict(theirs.hyper):
            raise refused(
                tier,
                f"its scalars are {dict(theirs.hyper)}, and a round announces {dict(ours.hyper)} to all: a candidate "
                "differs in what is compiled, such as batch, steps or momentum",
            )


def refused(tier: str, why: str) -> ConfigError:
    """Return the error for a tier whose candidate cannot be tried."""
    return ConfigError(
        f"the candidate of [rollout] cannot be tried in tier {tier!r}: {why}; change [rollout.algorithm], or begin another "
        "federation with it",
        tier=tier,
    )
