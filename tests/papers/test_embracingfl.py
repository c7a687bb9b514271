"""EmbracingFL's entries: shared runs, verdicts, counts, the quadratic of Theorem 1, and the pilot's choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.api.simulate import Simulation
from edgefl.setup.data import open_data
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.width.submodel import Width
from reproduce.command import PUBLISHED
from reproduce.embracingfl import (
    accounting,
    federations,
    tables1and10,
    tables2and9,
    tables3to7,
    theory,
)
from reproduce.entry import ArmRun, Measurements, NotRunError, Results
from reproduce.pages import EntryResults, write_page
from reproduce.runs import Task, add_records, run_arm
from reproduce.verdicts import verdicts
from tests.needs import require_data


def test_a_small_run_fills_the_pages_of_both_tables(tmp_path: Path) -> None:
    """It runs the arm that is evaluated with moving statistics; edgefl itself estimates them."""
    require_data("cifar10")
    entry = tables2and9.ENTRY_2
    arm = next(arm for arm in entry.arms("smoke") if arm.name == "width reduction, global")
    record = run_arm(Task(entry=entry.name, arm=arm.name, scale="smoke", seed=0), arm, tmp_path / "work")
    add_records([record], entry, tmp_path)

    found = write_page(tables2and9.ENTRY_9, tmp_path)
    best = 100 * record.figures["best"]
    page = (tmp_path / "embracingfl/table9.md").read_text()
    assert f"| width reduction, global | {best:.2f} (19.21) |" in page
    assert [each.answer for each in found.verdicts] == ["not run"] * 3

    ended = Simulation(tmp_path / "work" / "simulation")
    dataset, module = open_data(ended.federation), federations.pooled(pool=4).module
    module.load_state_dict({name: torch.from_numpy(array) for name, array in ended.model.items()})
    batch = dataset.test_batch(np.arange(len(dataset.test_y)))
    right = module.eval()(torch.from_numpy(batch["x"])).argmax(1).numpy() == batch["y"]
    number, accuracy = record.lines["accuracy"][-1]
    assert number == 2 and accuracy == pytest.approx(right.mean())
    assert accuracy != ended.history[-1].accuracy


def _accuracies(width: float, embracing: float) -> Results:
    """Return five seeds of Tables 2 and 9 whose accuracies differ by what is given, with noise of half a point."""
    rng = np.random.default_rng(0)
    means = {
        arm.name: (width if federations.WIDTH in arm.name else embracing) for arm in tables2and9.arms("cpu")
    }
    means["strong alone"] = 0.4
    return Results(
        {
            arm: {seed: Measurements({"best": mean + rng.normal(0, 0.005)}) for seed in range(5)}
            for arm, mean in means.items()
        }
    )


def test_methods_that_are_exchanged_turn_verdicts() -> None:
    right, exchanged, equal = (_accuracies(*each) for each in ((0.45, 0.55), (0.55, 0.45), (0.5, 0.5)))
    answers = [verdicts(tables2and9.ENTRY_2, each, 5)[1].answer for each in (right, exchanged, equal)]
    assert answers == ["reproduced", "contradicted", "inconclusive"]


def test_rounds_to_a_target_are_those_of_the_same_seed() -> None:
    ours, theirs = tables3to7.pair(7)
    lines = {ours: [(2.0, 0.3), (4.0, 0.56)], theirs: [(2.0, 0.2), (4.0, 0.4), (6.0, 0.558)]}
    results = Results(
        {arm: {3: Measurements({"best": line[-1][1]}, {"accuracy": line})} for arm, line in lines.items()}
    )

    assert tables3to7.fewer_rounds(7)(results).tolist() == [2.0]
    more = {
        **results.runs,
        theirs: {**results.runs[theirs], 4: results.runs[theirs][3]},
    }  # a seed of one method only
    assert tables3to7.fewer_rounds(7)(Results(more)).tolist() == [2.0]
    with pytest.raises(NotRunError):
        tables3to7.fewer_rounds(2)(results)


@pytest.mark.slow
def test_all_numbers_of_tables_1_and_10_and_the_averages_agree() -> None:
    counts = tables1and10.run(ArmRun(0, "smoke", lambda _: None))

    assert all(check.test(Results({"counts": {0: counts}}))[0] for check in tables1and10.ENTRY.checks)
    wrong = counts.figures | {"cnn, weak, activations": 63.0}
    planted = [
        check.test(Results({"counts": {0: Measurements(wrong)}})) for check in tables1and10.ENTRY.checks
    ]
    assert planted[0] == (False, "cnn, weak, activations") and planted[1][0]


def test_pooling_leaves_units_and_parameters_as_they_are() -> None:
    spec = federations.pooled(pool=2)

    assert spec.units == ("stem", "block1", "block2", "block3", "head")
    assert spec.module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    capacities = [accounting.capacity(OutputSide(spec, cut)) for cut in (2, 3)]
    capacities += [accounting.capacity(Width(spec, ratio, "floor")) for ratio in (0.45, 0.2)]
    assert accounting.full(spec) == accounting.TrainedPartCounts(78_330, 819_520)
    assert np.round(capacities, 3).tolist() == [0.410, 0.175, 0.417, 0.175]  # embracingfl.md 9.2


def test_the_quadratic_ends_at_its_floor() -> None:
    a, b = np.array([-1.0, 0.5, 2.0, 4.0]), np.array([1.0, -2.0, 0.0, 3.0])

    ends = {strong: theory.squares(a, b, strong, 4000, 0.003)[-1] for strong in (1, 2, 4)}
    spread = np.var(a + b / 2)
    assert ends[1] == pytest.approx(spread, rel=0.02) and ends[2] == pytest.approx(spread / 3, rel=0.02)
    assert ends[4] < 1e-3


def test_the_learning_rates_are_those_of_the_pilot() -> None:
    found = EntryResults(federations.PILOT, PUBLISHED, "cpu")
    for choice in federations.PILOT.choices:
        if found.results.runs.keys() >= set(choice.candidates.values()):
            assert float(choice.of(found.results)) == federations.CHOSEN[choice.name]
