"""Evaluation rounds of a run on this machine: what its folder holds for replay, audit, dashboard and trackers."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.analysis.curves import curves
from edgefl.analysis.replay import replay
from edgefl.api.progress import planned_rounds
from edgefl.api.run import Run, evaluate
from edgefl.config import Federation, parse
from edgefl.config.text import dump
from edgefl.tracking.trackers import scalars
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.dashboard.views import summary
from edgefl_server.events import DeviceEvaluation
from edgefl_server.storage.audit import verify
from tests.cli.runner import edgefl as command

EVALUATIONS = [3, 4]
"""The run's evaluation round, after two training rounds, and one that was requested later."""


def federation() -> Federation:
    return parse(
        {
            "federation": {"name": "evaluated", "rounds": 2},
            "model": {"name": "mlp", "options": {"hidden": [8]}},
            "algorithm": {"batch": 8, "steps": 3},
            "data": {"name": "digits", "train_samples": 120, "test_samples": 50},
            "round": {"keep_updates": True},
            "evaluate": {"split": 0.4, "every": 2},
            "tiers": {"strong": {"count": 2}, "weak": {"cut": 1, "count": 1}},
        },
        source="the test",
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run") / "out"
    edgefl.run(federation(), folder)
    evaluate(folder)
    return edgefl.load_run(folder)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> edgefl.Simulation:
    return edgefl.simulate(federation(), tmp_path_factory.mktemp("simulation") / "out")


def evaluations_of(ran: Run) -> dict[int, DeviceEvaluation]:
    return {row.round: row.evaluation for row in ran.history if row.evaluation is not None}


@pytest.mark.e2e
def test_a_run_is_repeated_with_its_evaluations(ran: Run, tmp_path: Path) -> None:
    assert list(evaluations_of(ran)) == EVALUATIONS and planned_rounds(ran.federation) == 3
    done = replay(ran.folder)
    assert done.same and [each.updates for each in done.rounds] == [3, 3, 3, 3]
    repeated = {each.round: each.evaluation for each in done.rounds if each.evaluation is not None}
    assert repeated == evaluations_of(ran)
    assert done.rounds[1].weights_sha256 == done.rounds[3].weights_sha256


@pytest.mark.e2e
def test_an_evaluation_that_the_journal_has_otherwise_is_named(ran: Run, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(ran.folder, copy)
    with closing(sqlite3.connect(copy / "journal.sqlite")) as journal:
        where = "'$.evaluation.trained_rounds', 1) WHERE round = 3"
        journal.execute(f"UPDATE rounds SET outcome = json_set(outcome, {where}")
        journal.commit()
    assert replay(copy).first == 3


@pytest.mark.e2e
def test_the_audit_log_holds_evaluation_rounds(ran: Run) -> None:
    found = verify(ran.folder)
    assert (found.problems, found.rounds, found.updates) == ((), 4, 12)


@pytest.mark.e2e
def test_journal_and_events_show_the_same_results_on_the_dashboard(ran: Run, tmp_path: Path) -> None:
    for names in (("journal.sqlite",), ("history.jsonl",), ("events.jsonl",)):
        folder = tmp_path / names[0]
        folder.mkdir()
        for path in ran.folder.glob(f"{names[0]}*"):
            shutil.copy(path, folder)
        found = FolderSource(folder).begin()
        shown = {number: row.evaluation for number, row in found.rounds.items() if row.evaluates}
        assert shown == evaluations_of(ran), names
        assert len(summary.evaluation_rows(found)) == 2 * 3 * 3, "rounds, groups, metrics"


@pytest.mark.e2e
def test_curves_of_a_run_hold_its_evaluations(ran: Run) -> None:
    tier = np.full(4, np.nan)
    tier[2:] = [evaluations_of(ran)[number].tiers["weak"].metrics["accuracy"] for number in EVALUATIONS]
    np.testing.assert_array_equal(ran.curves["tier.weak.accuracy"], tier)
    assert np.isfinite(ran.curves["devices.loss.worst_decile"]).tolist() == [False, False, True, True]


def test_curves_of_a_simulation_hold_its_evaluations(simulated: edgefl.Simulation) -> None:
    *_, last = simulated.history
    numbers = {name: value for name, value in scalars(last).items() if name.startswith(("devices.", "tier."))}
    assert len(numbers) > 8
    for name, value in numbers.items():
        np.testing.assert_array_equal(simulated.curves[name], [np.nan, np.nan, value])


def test_a_simulation_tracks_charts_and_prints_its_evaluations(simulated: edgefl.Simulation) -> None:
    *_, last = simulated.history
    assert [row.round for row in simulated.history if row.evaluation is not None] == [3]
    numbers = scalars(last)
    assert {"devices.accuracy", "devices.accuracy.median", "tier.weak.accuracy"} <= numbers.keys()
    assert last.evaluation is not None and last.evaluation.devices is not None
    assert numbers["devices.accuracy.worst_decile"] == last.evaluation.devices.worst_decile["accuracy"]
    assert "accuracy" not in numbers

    picture = curves(simulated.history, "the test")["accuracy"]
    assert "median device" in picture
    points = re.findall(r'<polyline [^>]*points="([^"]*)"', picture)
    assert [len(each.split()) for each in points] == [2], (
        "test data: the training rounds, without a gap or a zero"
    )
    alone = curves([row for row in simulated.history if row.evaluation is None], "the test")["accuracy"]
    assert "median device" not in alone


def test_the_simulators_command_shows_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(dump(federation()))
    printed = command("simulate", tmp_path / "federation.toml", "--out", tmp_path / "out")
    assert "on devices" in printed
    assert "3 devices" in printed.splitlines()[-1] and printed.splitlines()[-1].startswith(
        "on devices: accuracy "
    )
