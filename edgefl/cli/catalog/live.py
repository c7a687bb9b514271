"""The facts about the catalogs, taken from the catalogs themselves: this builds every model, and takes some seconds.

``python -m edgefl.cli.catalog.live`` writes them to the file that commands read (:mod:`edgefl.facts`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from inspect import signature
from types import EllipsisType, NoneType, UnionType
from typing import Any

from edgefl import facts
from edgefl.cli.catalog.programs import optimizer_rows, options_of, program_rows, summary
from edgefl.cli.federation.updates import codec_rows
from edgefl.codecs import catalog as codecs
from edgefl.codecs.catalog import CODECS
from edgefl.facts import Facts, Option, Options
from edgefl.models.losses import LOSSES
from edgefl.models.zoo.catalog import MODELS, build_model
from edgefl.optimizers import OPTIMIZERS
from edgefl.programs.catalog import PROGRAMS
from edgefl.submodels.catalog import KINDS
from edgefl.submodels.output_side import accounting
from edgefl.submodels.output_side.submodel import TIERS

Rows = list[dict[str, Any]]

_PLAIN = (bool, dict, float, int, list, str, tuple)


def live_facts() -> Facts:
    """What the catalogs hold now."""
    training = {name: codecs.build(name).training for name in CODECS}
    return Facts(
        rows={
            "models": model_rows(),
            "losses": loss_rows(),
            "kinds": kind_rows(),
            "submodels": submodel_rows(),
            "programs": program_rows(),
            "optimizers": optimizer_rows(),
            "codecs": codec_rows(),
        },
        models=_options_of(MODELS, upon=0),
        losses=_options_of(LOSSES, upon=0),
        kinds=_options_of(KINDS),
        programs=_options_of(PROGRAMS),
        optimizers=_options_of(OPTIMIZERS, upon=0),
        codecs=_options_of(CODECS),
        training={name: each.program if each else "" for name, each in training.items()},
    )


def model_rows() -> Rows:
    """One row per model, with its default options."""
    rows = []
    for name in MODELS:
        spec = build_model(name)
        parameters = sum(parameter.numel() for parameter in spec.module.parameters())
        rows.append(
            {
                "name": name,
                "parameters": parameters,
                "input": list(spec.sample.shape),
                "units": list(spec.units),
            }
        )
    return rows


def loss_rows() -> Rows:
    """One row per loss, with its options and their defaults."""
    return [
        {
            "name": name,
            "what": summary(factory),
            "options": options_of(factory, 0),
        }
        for name, factory in LOSSES.items()
    ]


def submodel_rows() -> Rows:
    """One row per preset tier of a model."""
    rows = []
    for model, tiers in TIERS.items():
        spec = build_model(model)
        whole = accounting.full(spec)
        for tier, preset in tiers.items():
            submodel = preset.of(spec)
            cost = accounting.tier(submodel)
            rows.append(
                {
                    "kind": "output_side",
                    "model": model,
                    "tier": tier,
                    "cut": preset.cut,
                    "chunks": len(submodel.prefix),
                    "parameters": cost.p,
                    "activations": cost.a,
                    "capacity": round(cost.mem / whole.mem, 4),
                }
            )
    return rows


def kind_rows() -> Rows:
    """One row per kind of submodels."""
    return [
        {
            "kind": name,
            "what": (factory.__doc__ or "").strip().split("\n\n")[0].replace("\n   ", ""),
            "options": [option for option in signature(factory).parameters if option != "spec"],
        }
        for name, factory in KINDS.items()
    ]


def _options_of(catalog: Mapping[str, Callable[..., Any]], *, upon: int = 1) -> Options:
    """The options of each factory; its first ``upon`` parameters are what it is built upon."""
    return {name: _options(factory, upon) for name, factory in catalog.items()}


def _options(factory: Callable[..., Any], upon: int) -> dict[str, Option]:
    hints = typing.get_type_hints(factory)
    names = list(inspect.signature(factory).parameters)[upon:]
    return {name: Option(type=_written(hints.get(name, Any))) for name in names}


def _written(hint: Any) -> str:
    """A type as :func:`edgefl.facts.type_of` reads it; ``Any`` for one that a file's values are not held against."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is NoneType:
        return "None"
    if hint in (Ellipsis, EllipsisType):
        return "..."
    if origin in (typing.Union, UnionType):
        return " | ".join(map(_written, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_written, arguments))}]"
    return hint.__name__ if hint in _PLAIN else "Any"


def main() -> None:
    facts.PLACE.write_bytes(facts.encode(live_facts()))


if __name__ == "__main__":
    main()
