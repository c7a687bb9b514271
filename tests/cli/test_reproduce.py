"""``edgefl reproduce``: what there is, numbers beside what they should be, and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from edgefl.analysis.reproduce import catalog, counterexample
from edgefl.analysis.reproduce.report import ReproductionReport, holds, near
from edgefl.cli import app
from edgefl.cli.analysis.reproduce import conclude
from edgefl.wire.errors import ConfigError
from tests.cli.runner import runner

NAME = "fafed/counterexample"


def call(*arguments: str) -> Any:
    return runner().invoke(app, ["reproduce", *arguments])


def test_without_a_name_it_lists_what_there_is() -> None:
    assert NAME in call().stdout
    (entry, *_) = json.loads(call("--json").stdout)
    assert entry["name"] == NAME and entry["what"]


def test_an_unknown_name_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=f"'fafed/nothing'; there are: .*{NAME}"):
        catalog.named("fafed/nothing")
    assert isinstance(call("fafed/nothing").exception, ConfigError)


def test_a_bound_below_one_round_is_refused_with_what_to_give() -> None:
    refused = call(NAME, "--steps", "19").exception
    assert isinstance(refused, ConfigError) and "give 20 or more" in refused.message


def test_the_counter_example_agrees_with_the_spec_and_leaves_its_charts(tmp_path: Path) -> None:
    answer = call(NAME, "--steps", "20", "--out", str(tmp_path / "plots"), "--json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["agrees"] and all(row["agrees"] for row in found["rows"])
    compared = {row["run"]: row["found"] for row in found["rows"] if row["expected"] is not None}
    assert len(compared) >= 15 and compared["naive, q=5"] > 10
    assert len(found["charts"]) == 2
    for chart in found["charts"]:
        assert ElementTree.parse(chart).getroot().tag.endswith("svg")


@pytest.mark.parametrize("as_json", [True, False])
def test_what_does_not_agree_is_said_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    rows = (near("a run", "x", 1.0, 2.0, 0.5), holds("a run", "falls", 1.0, True))
    with pytest.raises(typer.Exit) as ended:
        conclude("test", ReproductionReport(rows, {}, ""), [], 1.0, as_json=as_json)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert json.loads(said)["agrees"] is False if as_json else "1 of 2 agree" in said
    conclude("test", ReproductionReport(rows[1:], {}, ""), [], 1.0, as_json=as_json)


def test_every_expected_number_is_one_that_its_run_reaches() -> None:
    runs = [*counterexample._naive_runs(), *counterexample._fafed_runs(), *counterexample._fedavg_runs()]
    assert len({each.name for each in runs}) == len(runs)
    for each in runs:
        q = each.program().phases[0].steps
        assert each.steps % q == 0
        assert each.known and all(known.at <= each.steps and known.at % q == 0 for known in each.known)


def test_what_runs_on_a_devices_engines_is_listed_with_the_rest() -> None:
    assert {entry["name"] for entry in json.loads(call("--json").stdout)} >= {NAME, "embracingfl/device"}


def test_what_has_no_quick_form_says_so() -> None:
    refused = call(NAME, "--quick").exception
    assert isinstance(refused, ConfigError) and "no quick form; bound it with" in refused.message
