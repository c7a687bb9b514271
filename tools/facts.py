"""The facts about the catalogs, taken from the catalogs themselves: this builds every model, and takes some seconds.

``python -m tools.facts`` writes them to the file that commands read (:mod:`edgefl.facts`).
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from inspect import signature
from types import EllipsisType, NoneType, UnionType
from typing import Any

from benchmarks.algorithms import AlgorithmRow, AlgorithmSettings, measure
from edgefl import algorithms, facts
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs import catalog as codecs
from edgefl.codecs.catalog import CODECS
from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError, ModelError
from edgefl.facts import CatalogFacts, FactoryOption, Options
from edgefl.models.exits import with_exits
from edgefl.models.losses import LOSSES
from edgefl.models.zoo.catalog import MODELS, build_model
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS
from edgefl.setup.training import algorithm_of, why_not
from edgefl.submodels.catalog import KINDS
from edgefl.submodels.output_side.submodel import TIERS, OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.update.form import FloatEncoding, bits_per_entry
from reproduce.embracingfl import accounting
from tools.combinations import combination_rows

Rows = list[dict[str, Any]]

_ROLE = re.compile(r":\w+:`(?:[\w.]*\.)?(\w+)`")
"""A reference such as :func:`edgefl.algorithms.baselines.sgd.sgd`, of which people read the last name."""
_PLAIN = (bool, dict, float, int, list, str, tuple)


def live_facts() -> CatalogFacts:
    """What the catalogs hold now."""
    training = {name: codecs.build(name).training for name in CODECS}
    return CatalogFacts(
        rows={
            "models": model_rows(),
            "losses": loss_rows(),
            "kinds": kind_rows(),
            "submodels": submodel_rows(),
            "algorithms": algorithm_rows(),
            "optimizers": optimizer_rows(),
            "codecs": codec_rows(),
            "combinations": combination_rows(),
        },
        models=_options_of(MODELS, upon=0),
        losses=_options_of(LOSSES, upon=0),
        kinds=_options_of(KINDS),
        algorithms=_options_of(ALGORITHMS),
        optimizers=_options_of(OPTIMIZERS, upon=0),
        codecs=_options_of(CODECS),
        training={name: each.algorithm if each else "" for name, each in training.items()},
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
                "options": options_of(MODELS[name], 0),
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
            "what": _noun(factory.__doc__ or ""),
            "options": [option for option in signature(factory).parameters if option != "spec"],
        }
        for name, factory in KINDS.items()
    ]


def algorithm_rows() -> list[dict[str, Any]]:
    """One row per algorithm, its cost measured on a model of a few parameters."""
    rows = []
    for name, factory in ALGORITHMS.items():
        objective, measured = _measured(name)
        made = algorithms.build(name, objective)
        turn = [row for row in measured if row.exchange != "opening"]
        opening = [row for row in measured if row.exchange == "opening"]
        rows.append(
            {
                "name": name,
                "what": summary(factory),
                "server": made.server.name,
                "server_state": list(made.server_state),
                "exchanges": len(turn),
                "opening": len(opening),
                "gradients": turn[-1].gradients_per_step,
                "products": turn[-1].products_per_step,
                "full": any(phase.over_data for each in made.exchanges for phase in each.phases),
                "up": sum(row.up for row in turn),
                "down": sum(row.down for row in turn),
                "kept": turn[-1].kept,
                "everyone": made.whole,
                "not_buffered": why_not(made),
                "options": options_of(factory, 1),
                "scalars": sorted(scalars_of(made) & options_of(factory, 1).keys()),
                "server_options": sorted(server_options_of(made) & options_of(factory, 1).keys()),
            }
        )
    return rows


def _measured(name: str) -> tuple[Any, list[AlgorithmRow]]:
    """(the objective, a row for each exchange) on a small model: dense layers, with exits or with batch norm where the
    algorithm needs them.
    """
    settings = AlgorithmSettings(batch=2, steps=2, samples=4, repeat=0)
    plain = build_model("mlp", size=8, hidden=[64, 32])
    for spec in (plain, with_exits(plain), build_model("resnet8", size=8)):
        try:
            return Objective.of(OutputSide(spec, 0)), measure(spec, name, settings)
        except (ConfigError, ModelError):
            continue
    raise AssertionError(f"no small model for {name}")


def scalars_of(algorithm: Algorithm) -> set[str]:
    """The options that a round announces, by their own names or as what its schedule makes of them."""
    return set().union(*(exchange.hyper.keys() | exchange.announced for exchange in algorithm.exchanges))


def server_options_of(algorithm: Algorithm) -> set[str]:
    """The options that the server alone reads, when it makes the new model of the averages."""
    return set().union(*(exchange.server.options for exchange in algorithm.exchanges))


def optimizer_rows() -> list[dict[str, Any]]:
    """One row per optimizer of the server."""
    return [
        {
            "name": name,
            "what": summary(factory),
            "server_state": list(factory().state),
            "options": options_of(factory, 0),
        }
        for name, factory in OPTIMIZERS.items()
    ]


def summary(factory: Callable[..., Any]) -> str:
    """What a factory is in a line: the first of its own description, or of its module's if that begins with formulas."""
    own = (inspect.getdoc(factory) or "").partition("\n")[0].removeprefix("Return ")
    module = (inspect.getdoc(inspect.getmodule(factory)) or "").partition("\n")[0]
    return _ROLE.sub(r"\1", own if own.endswith(".") else module).replace("``", "")


def options_of(factory: Callable[..., Any], upon: int) -> dict[str, Any]:
    """Name and default of every option."""
    parameters = list(inspect.signature(factory).parameters.values())[upon:]
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def codec_rows() -> list[dict[str, Any]]:
    """What there is to choose from; ``bits`` is what an entry takes with the default options."""
    smallest = OutputSide(build_model("mlp", hidden=[1]), 0)
    return [
        {
            "name": name,
            "what": _what(factory),
            "bits": _default_bits(name, smallest),
            "options": {
                option.name: option.default
                for option in signature(factory).parameters.values()
                if option.kind is option.KEYWORD_ONLY
            },
        }
        for name, factory in CODECS.items()
    ]


def _what(factory: Callable[..., Any]) -> str:
    """The first paragraph of its docstring, without references into the code."""
    return re.sub(r" \(:func:[^)]*\)", "", _noun(factory.__doc__ or ""))


def _noun(text: str) -> str:
    """The first paragraph of a docstring without its imperative."""
    first = " ".join(text.partition("\n\n")[0].split()).removeprefix("Return ")
    return first[:1].upper() + first[1:]


def _default_bits(codec: str, submodel: Submodel) -> float:
    """Of the trained entries of ``submodel``: for some codecs only their algorithm knows."""
    sections = algorithm_of(parse({"codec": {"name": codec}}, source=codec), submodel).form.sections
    return bits_per_entry(sections[0].encoding if sections else FloatEncoding())


def _options_of(catalog: Mapping[str, Callable[..., Any]], *, upon: int = 1) -> Options:
    """The options of each factory; its first ``upon`` parameters are what it is built upon."""
    return {name: _options(factory, upon) for name, factory in catalog.items()}


def _options(factory: Callable[..., Any], upon: int) -> dict[str, FactoryOption]:
    hints = typing.get_type_hints(factory)
    names = list(inspect.signature(factory).parameters)[upon:]
    return {name: FactoryOption(type=_written(hints.get(name, Any))) for name in names}


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
