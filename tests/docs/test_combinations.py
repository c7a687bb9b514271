"""The documents' table of combinations, and the errors that point to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edgefl.codecs import catalog as codecs
from edgefl.config.names import name_problems
from edgefl.errors import EdgeflError
from edgefl.facts import shipped
from edgefl.facts.combinations import table
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog as kinds
from edgefl_export.compiler.algorithm import coded_algorithm
from tests.docs.documents import DOCS

HINT = "`edgefl ls combinations` lists"


def test_the_page_has_the_table_that_the_rules_give() -> None:
    lines = []
    for row in table():
        (what, names), *cells = row.items()
        lines.append(f"| {what} {names} | {' | '.join(cell for _, cell in cells)} |")
    page = (DOCS / "algorithms.md").read_text()
    assert "\n".join(lines) in page, "paste this into docs/algorithms.md:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("algorithm", "kind", "codec", "optimizer", "nearest"),
    [
        (
            "tcbgd",
            {"kind": "importance", "gamma": 0.5},
            "fedbat",
            "none",
            "algorithm 'sgd' with codec 'fedbat'",
        ),
        ("scaffold", {}, "int8", "none", "algorithm 'scaffold' with codec 'dense'"),
        ("scaffold", {}, "dense", "fedadam", "algorithm 'sgd' with optimizer 'fedadam'"),
        (
            "scaffold",
            {"kind": "importance", "gamma": 0.5},
            "dense",
            "none",
            "algorithm 'sgd' with kind 'importance'",
        ),
        (
            "sgd",
            {"kind": "width", "gamma": 0.5, "rolling": True},
            "ef_signsgd",
            "none",
            "kind 'rolling width'",
        ),
        ("swat", {"kind": "output_side", "cut": 1}, "dense", "none", "algorithm 'swat' with kind 'whole'"),
        (
            "binary",
            {"kind": "importance", "gamma": 0.5},
            "dense",
            "none",
            "algorithm 'binary' with kind 'whole'",
        ),
    ],
)
def test_a_refused_combination_names_the_nearest_that_works(
    algorithm: str, kind: Mapping[str, Any], codec: str, optimizer: str, nearest: str
) -> None:
    spec = build_model("mlp", size=8, hidden=[4, 4])
    options = {"kind": "output_side", **kind}
    if options["kind"] == "output_side":
        options.setdefault("cut", 0)
    submodel = kinds.build(spec, **options)
    with pytest.raises(EdgeflError) as refused:
        coded_algorithm(submodel, algorithm, {}, codecs.build(codec), optimizer=optimizer)
    assert HINT in str(refused.value) and nearest in str(refused.value)


def test_files_are_refused_by_the_same_table() -> None:
    """Every pair of an algorithm and a codec, without torch."""
    for row in shipped().rows["combinations"]:
        if row["what"] != "algorithm":
            continue
        for codec in shipped().codecs:
            problems = name_problems({"algorithm": {"name": row["name"]}, "codec": {"name": codec}})
            assert bool(problems) != (codec in row["codecs"]), (row["name"], codec)
            assert all(HINT in problem for problem in problems)
