"""Submodel types by name, as in federation files, as objects with their options (``Width(gamma=0.5)``), and their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgefl.contract.choice import SubmodelChoice, collect_factories, define_entry
from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.early_exit.submodel import early_exit
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.importance.thresholds import FIVE_SIZES, FOUR_SIZES
from edgefl.submodels.output_side.submodel import output_side
from edgefl.submodels.structured.submodel import importance_structured
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import width

EarlyExit = define_entry(SubmodelChoice, "early_exit", "EarlyExit", early_exit)
OutputSide = define_entry(SubmodelChoice, "output_side", "OutputSide", output_side)
Width = define_entry(SubmodelChoice, "width", "Width", width)
Importance = define_entry(SubmodelChoice, "importance", "Importance", importance)
ImportanceStructured = define_entry(
    SubmodelChoice, "importance_structured", "ImportanceStructured", importance_structured
)

KINDS: Mapping[str, Callable[..., Submodel]] = collect_factories(globals())


def build(spec: ModelSpec, kind: str, **options: Any) -> Submodel:
    """Return the submodel of type ``kind`` of the model ``spec``.

    Args:
        spec: Model.
        kind: Name of the type, such as ``width``.
        options: Options of the type by name. Others have their defaults.

    Raises:
        ConfigError: The kind or an option is unknown. The text lists the alternatives.
        ModelError: The model cannot be cut like this.
    """
    factory = KINDS.get(kind)
    if factory is None:
        raise ConfigError(f"no submodel kind {kind!r}; there are: {', '.join(sorted(KINDS))}", kind=kind)
    check_options(f"submodel kind {kind!r}", factory, options)
    return factory(spec, **options)


GAMMAS: tuple[float, ...] = tuple(sorted({*FOUR_SIZES, *FIVE_SIZES}))
"""Capacities of the paper (fiarse.md 2.10)."""


@dataclass(frozen=True)
class SubmodelSize:
    """Submodel type with the options that decide its size.

    Attributes:
        kind: Name of the type, such as ``width``.
        options: Options by name, such as ``gamma``.
    """

    kind: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Text of the options for messages: ``gamma 0.25``, ``cut 5``, ``whole model``, or ``as it is`` without options."""
        if self.kind == "width" and self.options.get("gamma") == 1.0:
            return "whole model"
        options = [f"{name} {_number_text(value)}" for name, value in self.options.items()]
        return ", ".join(options) or "as it is"

    @property
    def finer(self) -> SubmodelSize | None:
        """Same cut, with one download per frozen unit: more downloads, least memory in the forward pass.

        None if the size has fewer than two frozen units (stages of the model), or sets the number of downloads itself.
        """
        cut = self.options.get("cut", 0)
        return (
            None
            if cut < 2 or "chunks" in self.options
            else SubmodelSize(self.kind, {"cut": cut, "chunks": cut})
        )

    def of(self, spec: ModelSpec) -> Submodel:
        """Return the submodel of ``spec`` of this size.

        Raises:
            ConfigError: The kind is unknown.
            ModelError: The model has no submodel of this size.
        """
        return build(spec, self.kind, **self.options)


def sizes(spec: ModelSpec, kinds: Iterable[str] = (), gammas: Iterable[float] = ()) -> list[SubmodelSize]:
    """Return every size of the ``kinds`` (default: all kinds), largest first, without building or checking them.

    Args:
        spec: Model, whose units (stages of the model) limit the cuts.
        kinds: Submodel types.
        gammas: Sizes of a type that has the option ``gamma``. Default: :data:`GAMMAS`. A type with ``cut`` gets every
            cut.
    """
    all_sizes: list[SubmodelSize] = []
    for kind in kinds or KINDS:
        factory = KINDS.get(kind)
        takes = inspect.signature(factory).parameters if factory else {}
        if "gamma" in takes:
            shares = sorted(set(gammas) or GAMMAS, reverse=True)
            all_sizes += [SubmodelSize(kind, {"gamma": gamma}) for gamma in shares]
        elif "cut" in takes:
            all_sizes += [SubmodelSize(kind, {"cut": cut}) for cut in range(len(spec.units))]
        else:
            all_sizes.append(SubmodelSize(kind, {}))
    return all_sizes


def _number_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
