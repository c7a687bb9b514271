"""FedBAT's entries: arms that load, claims that the paper's own numbers meet, planted faults, counts and variances."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgefl.api.federation import load_federation
from edgefl.codecs.binarize import draw
from reproduce.command import PUBLISHED
from reproduce.entry import ArmRun, Entry, Federated, Measurements, Results
from reproduce.fedbat import ENTRIES, theory
from reproduce.fedbat.federations import CHOSEN, DATA, PILOT
from reproduce.fedbat.table1 import TABLE1, TABLE2, TABLE3, at
from reproduce.fedbat.table4 import TABLE4
from reproduce.fedbat.tables5and6 import TABLE5, TABLE6
from reproduce.runs import Task, read_records, results_of, run_arm
from reproduce.verdicts import verdicts
from tests.needs import require_data

TABLES = [TABLE1, TABLE2, TABLE3, TABLE5, TABLE6]


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry.name)
def test_every_cell_of_data_at_hand_has_an_arm_at_scale_paper(entry: Entry) -> None:
    arms = {arm.name for arm in entry.arms("paper")}
    cells = {cell.arm for grid in entry.grids for cell in grid.cells}
    assert {each for each in cells if each.partition(",")[0] in DATA} <= arms
    assert {arm.name for arm in entry.arms("cpu")} <= arms


def test_statements_fit_their_cells() -> None:
    for entry in ENTRIES:
        texts = [claim.text for claim in entry.claims] + [check.text for check in entry.checks]
        assert all(len(text) <= 40 for text in texts)


def test_scale_paper_is_the_papers_configuration() -> None:
    (arm,) = (arm for arm in TABLE1.arms("paper") if arm.name == at("FedBAT"))
    assert isinstance(arm, Federated)
    federation = load_federation(None, arm.settings)
    assert federation.federation.rounds == 100 and federation.tiers["all"].count == 100
    assert federation.round.fraction * 100 == 10
    assert federation.algorithm.arguments | {"batch": 64, "steps": 100, "lr": 0.1, "momentum": 0.0} == (
        federation.algorithm.arguments
    )
    assert federation.codec.options == {"rho": 6.0, "phi": 0.5, "statistics": 32}
    assert federation.model.options == {"initial": "torch"}


def _printed(entry: Entry, swapped: Mapping[str, str] | None = None) -> Results:
    """Return five runs of each cell with the paper's number. ``swapped``: arms in each other's place."""
    noise, runs = np.random.default_rng(0), {}
    for cell in (cell for grid in entry.grids for cell in grid.cells):
        assert cell is not None and cell.paper is not None
        values = cell.paper / 100 + noise.normal(0, 1e-4, 5)
        name = (swapped or {}).get(cell.arm, cell.arm)
        runs[name] = {seed: Measurements({cell.figure: float(value)}) for seed, value in enumerate(values)}
    return Results(runs)


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry.name)
def test_the_papers_own_numbers_reproduce_every_claim(entry: Entry) -> None:
    results = _printed(entry)
    if entry is TABLE2:
        results = Results({**_printed(TABLE1).runs, **results.runs})
    assert {each.answer for each in verdicts(entry, results, 5)} == {"reproduced"}


def test_rows_in_each_others_place_contradict_claims() -> None:
    fedbat, sign = at("FedBAT"), at("SignSGD")
    found = verdicts(TABLE1, _printed(TABLE1, {fedbat: sign, sign: fedbat}), 5)
    contradicted = {each.claim.text for each in found if each.answer == "contradicted"}
    assert {
        "FedBAT ahead of EF",
        "FedBAT ahead of SignSGD, Stoc",
        "FedBAT within 1 pt of FedAvg",
    } <= contradicted


def test_a_small_run_has_the_tables_figures(tmp_path: Path) -> None:
    require_data("fashion_mnist")
    arm = TABLE6.arms("smoke")[-1]
    record = run_arm(Task(entry=TABLE6.name, arm=arm.name, scale="smoke", seed=0), arm, tmp_path)
    assert record.figures["mean"] == pytest.approx(np.mean([y for _, y in record.lines["accuracy"]]))
    assert results_of([record]).of(arm.name, "accuracy").shape == (1,)


def test_step_sizes_are_those_that_the_pilot_chose() -> None:
    records = [each for each in read_records(PILOT, PUBLISHED) if each.scale == "cpu"]
    tried = {record.arm for record in records}
    for choice in PILOT.choices:
        if tried.issuperset(choice.candidates.values()):
            assert choice.of(results_of(records)) == CHOSEN[choice.name]


def _run(seed: int) -> ArmRun:
    return ArmRun(seed, "smoke", lambda _: None)


def test_variances_are_the_theorems_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds() -> list[bool]:
        results = Results({"moments": {seed: theory.moments(_run(seed)) for seed in range(3)}})
        return [check.test(results)[0] for check in theory.THEORY.checks]

    assert all(holds())
    monkeypatch.setattr("reproduce.fedbat.theory.draw", lambda m, alpha, zeta: 0.9 * draw(m, alpha, zeta))
    assert not any(holds())


def test_counts_are_the_specifications_and_grow_with_the_model() -> None:
    (arm,), (check,) = TABLE4.arms("smoke"), TABLE4.checks
    assert not isinstance(arm, Federated)
    counted = arm.compute(_run(0))
    assert check.test(Results({arm.name: {0: counted}}))[0]
    sizes = [value for name, value in counted.figures.items() if name.endswith("bytes")]
    assert len(sizes) == 4 and all(one < other for one, other in pairwise(sizes))
    wrong = Measurements({**counted.figures, "CNN, 1x28x28: bytes": 48_919})
    assert not check.test(Results({arm.name: {0: wrong}}))[0]
