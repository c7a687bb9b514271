"""The documents' table of combinations, and the errors that point to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edgefl.codecs import catalog as codecs
from edgefl.config.names import name_problems
from edgefl.facts import shipped
from edgefl.facts.combinations import table
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog as kinds
from edgefl.wire.errors import EdgeflError
from edgefl_export.front.program import coded_program
from tests.docs.documents import DOCS

HINT = "`edgefl ls combinations` lists"


def test_the_page_has_the_table_that_the_rules_give() -> None:
    lines = []
    for row in table():
        (what, names), *cells = row.items()
        lines.append(f"| {what} {names} | {' | '.join(cell for _, cell in cells)} |")
    page = (DOCS / "programs.md").read_text()
    assert "\n".join(lines) in page, "paste this into docs/programs.md:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("program", "kind", "codec", "optimizer", "nearest"),
    [
        (
            "tcbgd",
            {"kind": "importance", "gamma": 0.5},
            "fedbat",
            "none",
            "program 'sgd' with codec 'fedbat'",
        ),
        ("scaffold", {}, "int8", "none", "program 'scaffold' with codec 'dense'"),
        ("scaffold", {}, "dense", "fedadam", "program 'sgd' with optimizer 'fedadam'"),
        (
            "scaffold",
            {"kind": "importance", "gamma": 0.5},
            "dense",
            "none",
            "program 'sgd' with kind 'importance'",
        ),
        (
            "sgd",
            {"kind": "width", "gamma": 0.5, "rolling": True},
            "ef_signsgd",
            "none",
            "kind 'rolling width'",
        ),
        ("swat", {"kind": "output_side", "cut": 1}, "dense", "none", "program 'swat' with kind 'whole'"),
        (
            "binary",
            {"kind": "importance", "gamma": 0.5},
            "dense",
            "none",
            "program 'binary' with kind 'whole'",
        ),
    ],
)
def test_a_refused_combination_names_the_nearest_that_works(
    program: str, kind: Mapping[str, Any], codec: str, optimizer: str, nearest: str
) -> None:
    spec = build_model("mlp", size=8, hidden=[4, 4])
    options = {"kind": "output_side", **kind}
    if options["kind"] == "output_side":
        options.setdefault("cut", 0)
    submodel = kinds.build(spec, **options)
    with pytest.raises(EdgeflError) as refused:
        coded_program(submodel, program, {}, codecs.build(codec), optimizer=optimizer)
    assert HINT in str(refused.value) and nearest in str(refused.value)


def test_files_are_refused_by_the_same_table() -> None:
    """Every pair of a program and a codec, without torch."""
    for row in shipped().rows["combinations"]:
        if row["what"] != "program":
            continue
        for codec in shipped().codecs:
            problems = name_problems({"program": {"name": row["name"]}, "codec": {"name": codec}})
            assert bool(problems) != (codec in row["codecs"]), (row["name"], codec)
            assert all(HINT in problem for problem in problems)
