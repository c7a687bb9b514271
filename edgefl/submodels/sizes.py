"""The sizes in which each kind of submodel exists, as options of the catalogue."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgefl.models.spec import ModelSpec
from edgefl.submodels import catalog
from edgefl.submodels.importance.thresholds import FIVE_SIZES, FOUR_SIZES
from edgefl.submodels.submodel import Submodel

GAMMAS: tuple[float, ...] = tuple(sorted({*FOUR_SIZES, *FIVE_SIZES}))
"""The paper's capacities (fiarse.md 2.10)."""


@dataclass(frozen=True)
class Size:
    """A kind and the options that make it this large."""

    kind: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Return the options for people: ``gamma 0.25``, ``cut 5``, ``whole model``."""
        if self.kind == "width" and self.options.get("gamma") == 1.0:
            return "whole model"
        options = [f"{name} {_human(value)}" for name, value in self.options.items()]
        return ", ".join(options) or "as it is"

    @property
    def finer(self) -> Size | None:
        """The same cut with each frozen unit as a chunk of its own: more downloads, least memory in the forward pass."""
        cut = self.options.get("cut", 0)
        return None if cut < 2 or "chunks" in self.options else Size(self.kind, {"cut": cut, "chunks": cut})

    def of(self, spec: ModelSpec) -> Submodel:
        """The submodel; ConfigError or ModelError where it does not exist."""
        return catalog.build(spec, self.kind, **self.options)


def sizes(spec: ModelSpec, kinds: Iterable[str] = (), gammas: Iterable[float] = ()) -> list[Size]:
    """Every size of the ``kinds`` (default: all that there are), largest first; nothing is built or checked.

    A kind that takes ``gamma`` comes in ``gammas`` (default: :data:`GAMMAS`), one that takes ``cut`` in every cut.
    """
    all_sizes: list[Size] = []
    for kind in kinds or catalog.KINDS:
        factory = catalog.KINDS.get(kind)
        takes = inspect.signature(factory).parameters if factory else {}
        if "gamma" in takes:
            shares = sorted(set(gammas) or GAMMAS, reverse=True)
            all_sizes += [Size(kind, {"gamma": gamma}) for gamma in shares]
        elif "cut" in takes:
            all_sizes += [Size(kind, {"cut": cut}) for cut in range(len(spec.units))]
        else:
            all_sizes.append(Size(kind, {}))
    return all_sizes


def _human(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
