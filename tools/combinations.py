"""Table of combinations of algorithms, codecs and kinds, found by trying each one on small models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.codecs.catalog import CODECS
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError, ModelError
from edgefl.facts.combinations import ROLLING, WHOLE
from edgefl.models.exits import with_exits
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import NONE, OPTIMIZERS, with_optimizer
from edgefl.setup.training import why_not
from edgefl.submodels import catalog as kinds
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.formats import FORMATS
from edgefl_export.compiler.algorithm import DEFAULT_ALGORITHM, coded_algorithm, resolve_training

_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    WHOLE: ("output_side", {"cut": 0}),
    "output_side": ("output_side", {"cut": 1}),
    "width": ("width", {"gamma": 0.5}),
    ROLLING: ("width", {"gamma": 0.5, "rolling": True}),
    "importance": ("importance", {"gamma": 0.5}),
    "importance_structured": ("importance_structured", {"gamma": 0.5}),
    "early_exit": ("early_exit", {"exit": 1}),
}
"""Submodels by the name of the kind in the table; the same names in files, and variants of which rules depend."""


def combination_rows() -> list[dict[str, Any]]:
    """Return a row for each algorithm and each codec, with lists of the options that it can be combined with.

    The keys are ``what`` (``algorithm`` or ``codec``), ``name``, ``kinds``, ``engines``, and for an algorithm also
    ``codecs``, ``optimizers``, ``modes`` and ``exchanges``. Options have their defaults.
    """
    submodels = _submodels()
    return [
        *(_algorithm_row(name, submodels) for name in ALGORITHMS),
        *(_codec_row(name, submodels) for name in CODECS),
    ]


def _submodels() -> dict[str, list[Submodel]]:
    """Return small submodels by label of their kind: of a plain model, and of others with early exits and batch norms,
    which some algorithms need.
    """
    plain = build_model("mlp", size=8, hidden=[4, 4])
    specs: tuple[ModelSpec, ...] = (
        plain,
        with_exits(plain),
        _normed(plain, 1),
        with_exits(_normed(plain, 0)),
    )
    return {
        label: list(_build_each(partial(_submodel, kind, options), specs))
        for label, (kind, options) in _KINDS.items()
    }


def _normed(spec: ModelSpec, place: int) -> ModelSpec:
    """Return ``spec`` with a batch norm of 4 channels at the end of unit number ``place`` (from 0)."""
    units = [
        (name, nn.Sequential(unit, BatchNorm(4)) if number == place else unit)
        for number, (name, unit) in enumerate(spec.module.named_children())
    ]
    return replace(spec, module=sequential(units))


def _submodel(kind: str, options: Mapping[str, Any], spec: ModelSpec) -> Submodel:
    return kinds.build(spec, kind, **options)


def _build_each(build: Callable[[Any], Any], things: Iterable[Any]) -> Iterator[Any]:
    """Yield ``build(thing)`` for each thing for which it raises neither ConfigError nor ModelError."""
    for thing in things:
        try:
            made = build(thing)
        except (ConfigError, ModelError):
            continue
        yield made


def _algorithm_row(name: str, submodels: Mapping[str, list[Submodel]]) -> dict[str, Any]:
    dense = codecs.build("dense")

    def trained(submodel: Submodel) -> tuple[Submodel, Algorithm]:
        return submodel, coded_algorithm(submodel, name, {}, dense)

    made = {label: next(_build_each(trained, each), None) for label, each in submodels.items()}
    submodel, algorithm = next(each for each in made.values() if each is not None)
    return {
        "what": "algorithm",
        "name": name,
        "codecs": list(_build_each(lambda codec: _coded(codec, name, algorithm, submodel), CODECS)),
        "kinds": [label for label, each in made.items() if each is not None],
        "optimizers": [NONE, *_build_each(lambda each: with_optimizer(algorithm, each) and each, OPTIMIZERS)],
        "modes": ["synchronous", *([] if why_not(algorithm) else ["buffered"])],
        "exchanges": f"{len(algorithm.exchanges) - len(algorithm.opening)}{' + 1 once' if algorithm.opening else ''}",
        "engines": list(FORMATS),
    }


def _coded(codec: str, name: str, algorithm: Algorithm, submodel: Submodel) -> str:
    made = codecs.build(codec)
    if resolve_training(made, name, {})[0] == name:
        apply_codec(made, algorithm, Objective.of(submodel))
    return codec


def _codec_row(name: str, submodels: Mapping[str, list[Submodel]]) -> dict[str, Any]:
    def coded(submodel: Submodel) -> Algorithm:
        return coded_algorithm(submodel, DEFAULT_ALGORITHM, {}, codecs.build(name))

    found = [label for label, each in submodels.items() if any(_build_each(coded, each))]
    return {"what": "codec", "name": name, "kinds": found, "engines": list(FORMATS)}
