"""The submodel kinds by name, as federation files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.early_exit.fit import early_exit
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import output_side
from edgefl.submodels.structured.submodel import importance_structured
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import width

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
    check_options(f"submodel kind {kind!r}", factory, options)
    return factory(spec, **options)
