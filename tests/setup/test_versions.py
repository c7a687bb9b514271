"""Which methods go with devices that begin from several versions of the model at a time, and that files say so early."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl import algorithms
from edgefl.config import parse
from edgefl.config.names import name_problems
from edgefl.contract.algorithm import Algorithm, CarryRule
from edgefl.contract.server import ServerOpt
from edgefl.errors import ConfigError
from edgefl.facts import shipped
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.setup.runs import run_digest
from edgefl.setup.training import check_versions, why_not
from edgefl.submodels.output_side.submodel import OutputSide

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fleets" / "asynchronous.md"


@pytest.fixture(scope="module")
def sgd() -> Algorithm:
    spec = build_model("mlp", hidden=[4])
    return algorithms.build("sgd", Objective.of(OutputSide(spec, 0)), batch=2, steps=1)


def test_the_document_has_the_verdict_on_every_algorithm() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    verdicts = {row["name"]: row["not_buffered"] for row in shipped().rows["algorithms"]}
    assert {name: f"no: {why}" if why else "yes" for name, why in verdicts.items()}.items() <= told.items()
    assert [name for name, why in verdicts.items() if why] == [
        "scaffold", "fafed", "stem", "local_amsgrad", "mimeadam", "mimelite",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"whole": True}, "needs every device"),
        ({"carry_rule": CarryRule(needed=True)}, "good for the next round only"),
        ({"carry_rule": CarryRule(exchanges=2)}, "good for the next round only"),
        (
            {"server": ServerOpt("squares", unfold=lambda update: update)},
            "something else than what devices send",
        ),
    ],
)
def test_a_method_of_ones_own_is_told_why(sgd: Algorithm, changes: dict[str, Any], reason: str) -> None:
    assert why_not(sgd) == "" and reason in why_not(replace(sgd, **changes))
    with pytest.raises(ConfigError, match=f"'sgd' does not go with round.mode buffered: .*{reason}"):
        check_versions(replace(sgd, **changes))


def test_a_method_of_two_exchanges_does_not_go(sgd: Algorithm) -> None:
    assert "2 exchanges in turn" in why_not(replace(sgd, ahead=(sgd,)))


def federation(**tables: dict[str, Any]) -> Any:
    return parse(tables, source="the test")


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        (
            {"round": {"mode": "buffered", "fraction": 0.5}},
            "fraction is of mode synchronous, and mode is buffered",
        ),
        ({"round": {"mode": "buffered", "min_reports": 3}}, "min_reports is of mode synchronous"),
        (
            {"round": {"concurrency": 9, "buffer": 3}},
            "concurrency, buffer are of mode buffered, and mode is synchronous",
        ),
        ({"round": {"mode": "buffered"}, "downlink": {"encoding": "int8"}}, "begin from several versions"),
        (
            {"round": {"mode": "buffered"}, "selection": {"policy": "longest-idle"}},
            "selection.policy, measured and quorum",
        ),
        ({"round": {"mode": "buffered"}, "server": {"workers": 2}}, "set server.workers to 0"),
        ({"round": {"mode": "buffered", "buffer": 0}}, "greater than or equal to 1"),
        ({"round": {"mode": "buffered", "staleness": "cubic"}}, "'sqrt', 'inverse', 'constant' or 'hinge'"),
    ],
)
def test_a_file_is_told_what_does_not_go_together(tables: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        federation(**tables)
    assert problem in refused.value.message


def test_a_file_is_told_early_which_algorithm_does_not_go() -> None:
    tables = {"round": {"mode": "buffered"}, "algorithm": {"name": "scaffold"}}
    (problem,) = name_problems(tables)
    assert problem.startswith(
        "round.mode: 'buffered' does not go with algorithm 'scaffold': it needs every device"
    )
    assert not name_problems({**tables, "algorithm": {"name": "fedprox"}})


def test_what_is_kept_has_no_say_in_the_weights_and_the_mode_has() -> None:
    plain, kept = federation(), federation(round={"keep_updates": True})
    assert run_digest(plain) == run_digest(kept)
    assert run_digest(plain) != run_digest(federation(round={"mode": "buffered"}))
