"""FAFED's entries: their arms, the choice of settings, and what a run measures and decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.federation import load_federation
from edgefl.data.dataset import Dataset
from edgefl.setup import data
from reproduce.command import PUBLISHED
from reproduce.entry import SCALES, Entry, Measurements, Results
from reproduce.fafed import ENTRIES, federations, table2, theorems
from reproduce.fafed.federations import CHOSEN, LEVELS, METHODS, image_settings, with_method
from reproduce.pages import EntryResults
from reproduce.runs import Task, read_records, run_arm
from reproduce.verdicts import verdicts

DIGITS = {
    "data.name": "digits",
    "data.partition": "iid",
    "data.train_samples": 400,
    "model.name": "mlp",
    "model.options": {"hidden": [8]},
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_cell_has_an_arm(entry: Entry) -> None:
    names = {arm.name for scale in SCALES for arm in entry.arms(scale)}
    assert not names or {cell.arm for grid in entry.grids for cell in grid.cells} <= names


def test_arms_of_a_level_differ_by_their_method_alone() -> None:
    found = [with_method(image_settings("mnist", "paper", "low"), name, {"lr": 0.1}) for name in METHODS]
    alike = [{key: value for key, value in each.items() if key != "algorithm"} for each in found]
    assert all(each == alike[0] for each in alike)
    settings = {arm.name: arm.settings for arm in table2.TABLE.arms("paper")}
    assert len({str(each) for each in settings.values()}) == len(LEVELS) * len(METHODS)
    assert settings["FedAMS, low"]["optimizer"]["name"] == "fedams"


def test_paper_has_the_rounds_of_thirty_epochs() -> None:
    rounds = {level: image_settings("fashion_mnist", "paper", level)["federation.rounds"] for level in LEVELS}
    assert rounds == {"low": 900, "medium": 180, "high": 180}
    assert image_settings("cifar10_jpeg", "paper", "low")["federation.rounds"] == 750


def test_pilot_tries_the_grid_of_the_paper_on_training_samples() -> None:
    arms = {arm.name: arm.settings for arm in federations.PILOT.arms("paper")}
    assert len(arms) == len(LEVELS) * (5 + 5 + 6 + 9 + 9 + 7)
    assert {each["data.validation"] for each in arms.values()} == {0.1}
    for choice in federations.PILOT.choices:
        assert len(set(choice.candidates.values())) == len(choice.candidates)
        assert set(choice.candidates.values()) <= set(arms)


def test_tables_use_what_the_published_pilot_chose() -> None:
    found = EntryResults(federations.PILOT, PUBLISHED, "paper").results
    choices = iter(federations.PILOT.choices)
    for at in range(len(LEVELS)):
        for method, options in federations.GRID.items():
            for option in options:
                choice = next(choices)
                if all(arm in found.runs for arm in choice.candidates.values()):
                    assert choice.of(found) == f"{CHOSEN[method][option][at]:g}", choice.name


def _results(
    accuracies: Mapping[str, Sequence[float]], level: str = "low", figure: str = "accuracy"
) -> Results:
    return Results(
        {
            f"{method}, {level}": {seed: Measurements({figure: value}) for seed, value in enumerate(values)}
            for method, values in accuracies.items()
        }
    )


def test_shuffled_methods_change_the_verdict() -> None:
    noise = np.random.default_rng(0).normal(0, 0.001, (len(METHODS), 3))
    paper = {method: table2.TABLE_2[method][0] + noise[at] for at, method in enumerate(METHODS)}
    assert verdicts(table2.TABLE, _results(paper), 3)[0].answer == "reproduced"
    rows = {**paper, "FAFED": paper["FedAvg"], "FedAvg": paper["FAFED"]}
    assert verdicts(table2.TABLE, _results(rows), 3)[0].answer == "contradicted"
    close = {**paper, "FedAMS": paper["FAFED"] - noise[0]}
    assert verdicts(table2.TABLE, _results(close), 3)[0].answer == "inconclusive"
    assert {each.answer for each in verdicts(table2.TABLE, _results(paper), 3)[1:]} == {"not run"}


def test_a_run_measures_training_loss_and_permuted_labels_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {**DIGITS, "data.test_samples": 300, "federation.rounds": 4, "simulation.keep_every": 1}
    settings |= {"tiers": {"strong": {"count": 2, "devices": ["strong-*"]}}, "federation.seed": 1}
    arm = with_method({**settings, "algorithm": {"batch": 20, "steps": 20}}, "FedAvg", {"lr": 0.5})
    run = edgefl.simulate(load_federation(None, arm), tmp_path / "as it is")
    found = federations.training_loss(run)
    rounds, losses = zip(*found.lines["objective"], strict=True)
    assert rounds == (1, 2, 3, 4)
    assert found.figures["objective"] == losses[-1] < math.log(10)
    assert found.figures["perplexity"] == pytest.approx(math.exp(losses[-1]))
    assert run.history[-1].loss is not None and abs(losses[-1] - run.history[-1].loss) > 1e-3
    assert found.figures["accuracy"] > 0.6
    whole = data.open_data

    def permuted(*given: object, **options: object) -> Dataset:
        dataset = whole(*given, **options)  # type: ignore[arg-type]
        return replace(dataset, test_y=np.random.default_rng(0).permutation(dataset.test_y))

    monkeypatch.setattr("edgefl.api.simulate.open_data", permuted)
    run = edgefl.simulate(load_federation(None, arm), tmp_path / "permuted")
    assert federations.training_loss(run).figures["accuracy"] < 0.3


def test_theorem_1_at_smoke_holds_and_shows_the_numbers_of_the_paper(tmp_path: Path) -> None:
    entry = theorems.THEOREM_1
    runs = {
        arm.name: {
            0: run_arm(Task(entry=entry.name, arm=arm.name, scale="smoke", seed=0), arm, tmp_path / arm.name)
        }
        for arm in entry.arms("smoke")
    }
    found = Results({name: {0: Measurements(run[0].figures)} for name, run in runs.items()})
    (row,) = entry.grids[0].rows.values()
    for cell in row:
        assert cell is not None
        assert float(found.of(cell.arm, cell.figure)[0]) == pytest.approx(cell.paper, abs=6e-3)
    assert [check.test(found)[0] for check in entry.checks[:3]] == [True] * 3
    assert "last" not in runs[theorems.FAFED][0].figures


def test_figures_share_the_runs_of_table_2(tmp_path: Path) -> None:
    first = table2.FIGURES[0]
    assert first.runs == table2.TABLE.name and read_records(first, tmp_path) == []
    assert [arm.settings for arm in first.arms("paper")] == [
        arm.settings for arm in table2.TABLE.arms("paper")
    ]
