"""How large the updates of a federation's tiers are: for `edgefl validate` and `edgefl ls codecs`, and before a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.contract.program import Program
    from edgefl.data.dataset import Dataset
    from edgefl.models.spec import ModelSpec
    from edgefl.submodels.submodel import Submodel
    from edgefl.wire.update.size import UpdateSize


def tier_sizes(
    federation: Federation, spec: ModelSpec, submodels: Mapping[str, Submodel]
) -> dict[str, UpdateSize]:
    """The size of an update, by tier. ConfigError or ModelError, which begins with the tier's name, where codec, program
    and kind do not go together."""
    from edgefl.wire.regions import local_shape, pieces
    from edgefl.wire.update.size import update_size

    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    shapes = {name: array.shape for name, array in weights.items()}
    trained = {name for name, _ in spec.module.named_parameters(remove_duplicate=False)}
    by_tier = {}
    for tier, submodel in submodels.items():
        program = _program(federation, submodel, tier)
        regions = submodel.place(weights, 1).regions
        statistics = {
            name
            for name, region in regions.items()
            if not any(part in trained for part, _ in pieces(name, region, shapes))
        }
        local = _sent(program)
        if local is None:
            local = {name: local_shape(name, region, shapes) for name, region in regions.items()}
        by_tier[tier] = update_size(program.form, local, statistics)
    return by_tier


def _sent(program: Program) -> dict[str, tuple[int, ...]] | None:
    """The tensors of an update that holds more than weights, or less; None where it is the weights, in whatever form."""
    from edgefl.contract.tensors import role_of, select

    ports = (*program.start.inputs, *program.finish.inputs)
    if program.form.sections or not (program.server_state or any(role_of(name) == "carry" for name in ports)):
        return None
    update = select(program.finish(program.finish.example(0)), "update")
    return {name: tuple(tensor.shape) for name, tensor in update.items()}


def sizes(federation: Federation, dataset: Dataset) -> dict[str, UpdateSize]:
    """:func:`tier_sizes` of the federation's own model and tiers."""
    from edgefl.setup.model import federation_model, submodel_of

    spec = federation_model(federation, dataset)
    return tier_sizes(
        federation, spec, {tier: submodel_of(spec, tier, table) for tier, table in federation.tiers.items()}
    )


def _program(federation: Federation, submodel: Submodel, tier: str) -> Any:
    from edgefl.setup.training import program_of
    from edgefl.wire.errors import ConfigError, ModelError

    try:
        return program_of(federation, submodel)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"tier {tier!r}: {error.message}", **error.details) from error


def as_rows(updates: Mapping[str, UpdateSize]) -> list[dict[str, Any]]:
    """A row for each part of each tier's update, and one for the whole with names, shapes and padding."""
    rows: list[dict[str, Any]] = []
    for tier, update in updates.items():
        for part in update.parts:
            rows.append(
                {
                    "tier": tier,
                    "part": "statistics" if part.statistics else "trained",
                    "tensors": part.tensors,
                    "entries": part.entries,
                    "bits": part.bits,
                    "scales": part.scales,
                    "bytes": part.nbytes,
                    "ratio": 4 * part.entries / part.nbytes if part.nbytes else 1.0,
                }
            )
        entries = sum(part.entries for part in update.parts)
        rows.append(
            {
                "tier": tier,
                "part": "whole",
                "tensors": sum(part.tensors for part in update.parts),
                "entries": entries,
                "bits": 8 * update.nbytes / entries if entries else 0.0,
                "scales": sum(part.scales for part in update.parts),
                "bytes": update.nbytes,
                "ratio": update.ratio,
            }
        )
    return rows


def for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, in words: the tier's name once, sizes in KiB."""
    lines = [
        {
            **row,
            "bits": round(row["bits"], 2),
            "size": size(row["bytes"]),
            "smaller": f"{row['ratio']:.1f}x",
        }
        for row in rows
    ]
    return [{key: value for key, value in row.items() if key not in ("bytes", "ratio")} for row in lines]


def codec_rows() -> list[dict[str, Any]]:
    """What there is to choose from; ``bits`` is what an entry takes with the default options."""
    from inspect import signature

    from edgefl.codecs.catalog import CODECS
    from edgefl.models.zoo.catalog import build_model
    from edgefl.submodels.output_side.submodel import OutputSide

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
    text = " ".join((factory.__doc__ or "").partition("\n\n")[0].split())
    return re.sub(r" \(:func:[^)]*\)", "", text)


def _default_bits(codec: str, submodel: Submodel) -> float:
    """Of the trained entries of ``submodel``: for some codecs only their program knows."""
    from edgefl.config import parse
    from edgefl.setup.training import program_of
    from edgefl.wire.update.form import Values
    from edgefl.wire.update.size import bits_per_entry

    sections = program_of(parse({"codec": {"name": codec}}, source=codec), submodel).form.sections
    return bits_per_entry(sections[0].encoding if sections else Values())
