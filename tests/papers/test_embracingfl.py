"""EmbracingFL's entries: measures, counts and the theory's quadratic."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.width.submodel import Width
from reproduce.embracingfl import accounting, counts, heterogeneity, mixes, theory
from reproduce.embracingfl.small_models import pooled_resnet8
from reproduce.entry import ArmRun, Measurements
from reproduce.results import Results


def test_rounds_to_a_target_are_those_of_the_best_accuracy() -> None:
    case = 7
    ours, theirs = (heterogeneity.name(case, method) for method in (mixes.EMBRACING, mixes.WIDTH))
    lines = {ours: [(2.0, 0.3), (4.0, 0.56)], theirs: [(2.0, 0.2), (4.0, 0.4), (6.0, 0.558)]}
    results = Results([0], {}, {arm: [{"accuracy": line}] for arm, line in lines.items()})

    verdict = heterogeneity.fewer_rounds((case,))(results)
    assert verdict.held and verdict.ours == "case 7 (55%): 6, 4"
    assert math.isinf(heterogeneity.first_round([(1.0, 0.1)], 0.2))


@pytest.mark.slow
def test_all_numbers_of_tables_1_and_10_and_the_averages_agree(tmp_path: Path) -> None:
    found: Measurements = counts.run(ArmRun(0, "smoke", tmp_path, lambda _: None))
    results = Results([0], {counts.ARM: [found.figures]}, {counts.ARM: [{}]})

    assert all(claim.exact and claim.judge(results).held for claim in counts.ENTRY.claims)


def test_pooling_leaves_units_and_parameters_as_they_are() -> None:
    spec = pooled_resnet8(pool=2)

    assert spec.units == ("stem", "block1", "block2", "block3", "head")
    assert spec.module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    capacities = [accounting.capacity(OutputSide(spec, cut)) for cut in (2, 3)]
    capacities += [accounting.capacity(Width(spec, ratio, "floor")) for ratio in (0.45, 0.2)]
    assert accounting.full(spec) == accounting.TrainedPartCounts(78_330, 819_520)
    assert np.round(capacities, 3).tolist() == [0.410, 0.175, 0.417, 0.175]  # embracingfl.md 9.2


@pytest.mark.slow
def test_the_quadratic_stays_below_the_bound_and_ends_at_its_floor(tmp_path: Path) -> None:
    task = theory.Quadratic(np.array([-1.0, 0.5, 2.0, 4.0]), np.array([1.0, -2.0, 0.0, 3.0]))
    y, _ = task.parts

    ends = {strong: theory.squares(task, strong, 4000, 0.003)[-1] for strong in (1, 2, 4)}
    assert ends[1] == pytest.approx(y.apart, rel=0.02) and ends[2] == pytest.approx(y.apart / 3, rel=0.02)
    assert ends[4] < 1e-3
    found = theory.run(ArmRun(0, "smoke", tmp_path, lambda _: None))
    results = Results([0], {theory.ARM: [found.figures]}, {theory.ARM: [found.lines]})
    assert theory.ENTRY.claims[0].judge(results).held
