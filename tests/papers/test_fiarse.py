"""FIARSE's entries: arms load, measures are right, and faults change verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.federation import load_federation
from edgefl.lab.deployment import deployed_submodel
from reproduce.command import PUBLISHED
from reproduce.entry import SCALES, Measurements, NotRunError, Results
from reproduce.fiarse import ENTRIES
from reproduce.fiarse.federations import CHOSEN, PILOT, Setup, arm
from reproduce.fiarse.measures import SubmodelAccuracy, accuracies, label, reached
from reproduce.fiarse.tables import TABLES
from reproduce.runs import read_records, results_of
from reproduce.verdicts import verdicts

NOT_RUN = ("CIFAR-100", "ScaleFL, AGNews", "FjORD, AGNews")
TINY = Setup(
    (1 / 4, 1.0),
    3,
    6,
    {
        "federation.rounds": 4,
        "simulation.keep_every": 1,
        "algorithm.steps": 10,
        "model.name": "mlp",
        "model.options": {"hidden": (16,)},
        "data.name": "digits",
        "data.train_samples": 600,
        "data.test_samples": 200,
        "data.partition": "dirichlet_clients",
    },
)


def test_cells_and_figures_are_of_arms_that_exist() -> None:
    for entry in ENTRIES:
        names = {each.name for scale in SCALES for each in entry.arms(scale)}
        shown = {cell.arm for grid in entry.grids for cell in grid.cells}
        drawn = {arm for chart in entry.charts for arm in chart.arms}
        tried = {arm for choice in entry.choices for arm in choice.candidates.values()}
        lacking = {name for name in shown | drawn | tried if name not in names}
        assert all(name.endswith(NOT_RUN) for name in lacking), lacking
        cells = [*(claim.text for claim in entry.claims), *(claim.paper for claim in entry.claims)]
        assert all(len(text) <= 40 for text in cells)


def test_tables_have_the_settings_that_the_pilot_chose() -> None:
    records = [each for each in read_records(PILOT, PUBLISHED) if each.scale == "cpu"]
    results = results_of(records)
    for choice in PILOT.choices:
        if all(arm in results.runs for arm in choice.candidates.values()):
            assert choice.of(results) == str(CHOSEN[choice.name]), choice.name


def test_a_run_has_the_accuracy_of_every_size(tmp_path: Path) -> None:
    settings = arm("FIARSE", TINY).settings
    simulation = edgefl.simulate(load_federation(None, {**settings, "federation.seed": 1}), tmp_path / "run")

    found = accuracies(simulation)
    figures, lines = found.figures, found.lines
    judge = SubmodelAccuracy(simulation)
    whole = judge.by_class(deployed_submodel(judge.federation, judge.spec, tier="size1"), simulation.model)
    assert judge.overall(whole) == pytest.approx(lines["global 1"][-1][1]) == figures["global 1"] > 0.5
    assert figures["global"] == pytest.approx((figures["global 1"] + figures["global smallest"]) / 2)
    assert judge.local("size1", np.ones(10)) == pytest.approx(np.ones(3))
    assert sum(count for _, count in lines["clients"]) == 6
    assert [gamma for gamma, _ in lines["sizes"]] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    ever = [share for _, share in lines["ever trained"]]
    assert ever == sorted(ever) and ever[0] > 0.25


def test_permuted_test_labels_leave_chance(tmp_path: Path) -> None:
    settings = {**arm("HeteroFL", TINY).settings, "federation.seed": 1}
    simulation = edgefl.simulate(load_federation(None, settings), tmp_path / "run")
    judge = SubmodelAccuracy(simulation)
    labels = judge.dataset.test_y
    right = judge.overall(
        judge.by_class(deployed_submodel(judge.federation, judge.spec, tier="size1"), simulation.model)
    )

    labels[:] = np.random.default_rng(0).permutation(labels)
    assert (
        judge.overall(
            judge.by_class(deployed_submodel(judge.federation, judge.spec, tier="size1"), simulation.model)
        )
        < 0.25
        < right
    )


def _figures(better: float, seed: int) -> Measurements:
    noise = 0.002 * (seed % 3)
    names = ("local", "global", "local smallest", "local 1", "local gap")
    return Measurements({name: better + noise for name in names})


def test_rows_shuffled_between_methods_change_verdicts() -> None:
    levels = dict(zip(("HeteroFL", "FedRolex", "ScaleFL", "FIARSE"), (0.6, 0.5, 0.7, 0.8), strict=True))

    def answers(levels: dict[str, float]) -> list[str]:
        runs = {name: {seed: _figures(level, seed) for seed in range(5)} for name, level in levels.items()}
        return [each.answer for each in verdicts(TABLES[0], Results(runs), 5)]

    shuffled = levels | {"FIARSE": levels["FedRolex"], "FedRolex": levels["FIARSE"]}
    assert answers(levels)[:2] == ["reproduced", "reproduced"]
    assert answers(shuffled)[:2] == ["contradicted", "contradicted"]
    assert answers(levels)[2] == "reproduced" and answers(shuffled)[2] == "contradicted"
    assert answers(levels)[4] == "not run"


def test_sizes_have_the_papers_names() -> None:
    assert [label(gamma) for gamma in (1 / 64, 0.04, 0.25, 0.36, 1.0)] == ["1/64", "0.04", "1/4", "0.36", "1"]


def test_rounds_to_the_target_count_one_more_without_it() -> None:
    assert reached([(4, 0.6), (8, 0.71), (12, 0.6)]) == 8
    assert reached([(4, 0.6), (8, 0.6)]) == 12


def test_a_pilot_without_runs_chooses_nothing() -> None:
    with pytest.raises(NotRunError):
        PILOT.choices[0].of(Results({}))
