"""How large the updates of a federation's tiers are, as rows: for `edgefl validate` and `edgefl ls codecs`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.submodels.submodel import Submodel
    from edgefl.wire.update.size import UpdateSize


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
