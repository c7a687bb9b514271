"""Choice of the submodel to deploy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.config import Federation, TierTable
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import submodel_of
from edgefl.submodels.standalone import standalone
from edgefl.submodels.structured.submodel import Structured
from edgefl.submodels.submodel import Submodel
from edgefl.wire.tensors import Array

_SIZES = frozenset({"ratio", "exit", "width", "counts"})
"""Options that say how large a tier's submodel is, in words other than gamma."""


def chosen(
    federation: Federation,
    spec: ModelSpec,
    *,
    tier: str | None = None,
    kind: str | None = None,
    gamma: float | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Mapping[str, Array] | None = None,
) -> Submodel:
    """The submodel to deploy: as ``tier`` is cut, or of ``kind`` (default: the whole model), of any size ``gamma``.

    The options of a kind come from the federation's tiers of that kind, as the model was trained for them;
    ``options`` override them. Channel counts that are not given are those of the trained ``weights``; a tier keeps the
    ones its devices trained. ConfigError if that is not one way, ModelError if the weights are not the model's.
    """
    if tier is not None and kind is not None:
        raise ConfigError("give either a tier, to cut as it does, or a kind, not both", tier=tier, kind=kind)
    if tier is not None and tier not in federation.tiers:
        raise ConfigError(f"no tier {tier!r}; there are: {', '.join(federation.tiers) or 'none'}", tier=tier)
    table = federation.tiers[tier] if tier else _like(federation, kind or "output_side")
    if gamma is not None and table.kind == "output_side":
        raise ConfigError(
            "kind output_side is the whole model in inference; a gamma goes with another kind", gamma=gamma
        )
    size = {} if gamma is None else {"gamma": gamma}
    inherited = {name: value for name, value in table.options.items() if gamma is None or name not in _SIZES}
    table = table.model_copy(update={**size, "options": {**inherited, **(options or {})}})
    made = submodel_of(spec, tier or table.kind, table)
    if tier is None and weights is not None and isinstance(made, Structured) and isinstance(made.counts, str):
        standalone(made, weights)  # refuses those of another model
        return made.replanned(weights)
    return made


def _like(federation: Federation, kind: str) -> TierTable:
    """A tier of this kind without a size."""
    tiers = {name: table for name, table in federation.tiers.items() if table.kind == kind}
    if kind == "output_side" or not tiers:
        return TierTable(kind=kind)
    first, *others = tiers.values()
    if any(other.options != first.options for other in others):
        raise ConfigError(
            f"the tiers {', '.join(tiers)} of kind {kind} have different options; name one of them as the tier",
            tiers=tuple(tiers),
        )
    return TierTable(kind=kind, options=first.options)
