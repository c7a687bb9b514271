"""``python -m reproduce``: its list, errors, results and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from reproduce.__main__ import app
from reproduce.catalog import NAMES
from reproduce.command import conclude
from reproduce.fafed import counterexample
from reproduce.record import ClaimSummary, Summary
from tests.cli.runner import runner

NAME = "fafed/counterexample"
ROOT = Path(__file__).resolve().parents[2]
_WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('reproduce', run_name='__main__')"
)


def call(*arguments: str) -> Any:
    return runner().invoke(app, arguments)


def test_without_a_name_it_lists_what_there_is() -> None:
    assert NAME in call().stdout
    listed = json.loads(call("--json").stdout)
    assert [entry["name"] for entry in listed] == list(NAMES) and all(each["what"] for each in listed)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--help", 0, "--scale"),
        ("fafed/counterexmple", 2, "did you mean 'fafed/counterexample'?"),
        ("fafed --scale huge", 2, "no scale 'huge'; there are: smoke, cpu, paper"),
    ],
)
def test_help_and_a_wrong_word_need_no_torch(words: str, code: int, text: str) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert (ran.returncode, text in ran.stdout + ran.stderr) == (code, True), ran.stderr


def test_the_counter_example_agrees_with_the_spec_and_leaves_its_charts(tmp_path: Path) -> None:
    answer = call(NAME, "--out", str(tmp_path), "--json")
    assert answer.exit_code == 0
    (found,) = json.loads(answer.stdout)
    assert len(found["claims"]) == 5 and all(claim["held"] for claim in found["claims"])
    (arm,) = found["arms"]
    assert arm["mean"]["naive, q=5: xbar, t=100"] == pytest.approx(arm["paper"]["naive, q=5: xbar, t=100"])
    charts = list((tmp_path / NAME).glob("*.svg"))
    assert len(charts) == 2
    for chart in charts:
        assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    assert NAME in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("exact", "strict", "fails"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_what_does_not_hold_is_said_and_may_be_the_exit_code(
    capsys: pytest.CaptureFixture[str], as_json: bool, exact: bool, strict: bool, fails: bool
) -> None:
    claim = ClaimSummary(
        rank="H1", text="falls", paper="", ours="+1", held=False, confidence="", doubt="", exact=exact
    )
    summary = Summary(
        entry="paper/test",
        what="",
        scale="smoke",
        command="",
        seeds=[0],
        data=[],
        started="",
        seconds=1.0,
        machine={},
        arms=[],
        claims=[claim],
    )
    if fails:
        with pytest.raises(typer.Exit) as ended:
            conclude([summary], Path(), strict=strict, as_json=as_json)
        assert ended.value.exit_code == 1
    else:
        conclude([summary], Path(), strict=strict, as_json=as_json)
    said = capsys.readouterr().out
    assert json.loads(said)[0]["claims"][0]["held"] is False if as_json else "falls" in said


def test_every_expected_number_is_one_that_its_run_reaches() -> None:
    runs = [*counterexample._naive_runs(), *counterexample._fafed_runs(), *counterexample._fedavg_runs()]
    assert len({each.name for each in runs}) == len(runs)
    for each in runs:
        q = each.algorithm().phases[0].steps
        assert each.steps % q == 0
        assert each.known and all(known.at <= each.steps and known.at % q == 0 for known in each.known)
