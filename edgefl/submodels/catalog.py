"""The submodel kinds by name, as federation files have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from edgefl.models.spec import ModelSpec
from edgefl.submodels.early_exit.fit import early_exit
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side import output_side
from edgefl.submodels.structured.submodel import importance_structured
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width import width
from edgefl.wire.errors import ConfigError

KINDS: Mapping[str, Callable[..., Submodel]] = {
    "early_exit": early_exit,
    "output_side": output_side,
    "width": width,
    "importance": importance,
    "importance_structured": importance_structured,
}


def build(spec: ModelSpec, kind: str, **options: Any) -> Submodel:
    """The submodel ``kind`` of ``spec``. ConfigError, with what exists, for a wrong name or option; ModelError where
    the model cannot be cut so."""
    factory = KINDS.get(kind)
    if factory is None:
        raise ConfigError(f"no submodel kind {kind!r}; there are: {', '.join(sorted(KINDS))}", kind=kind)
    accepted = [name for name in inspect.signature(factory).parameters if name != "spec"]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(
            f"submodel kind {kind!r} has no option {unknown[0]!r}; it takes {', '.join(accepted)}",
            unknown=unknown,
            accepted=accepted,
        )
    return factory(spec, **options)
