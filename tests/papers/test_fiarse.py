"""FIARSE's entries: runs are measured and judged as they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.api.federation import load_federation
from reproduce.entry import Federated
from reproduce.fiarse.federations import Setup, fiarse
from reproduce.fiarse.measures import (
    above_all,
    accuracies_and_exploration,
    label,
    largest_gap,
    measured,
    mostly_above,
    reached,
    sooner,
    steadier,
)
from reproduce.results import Results, larger_lead
from reproduce.submodel_accuracy import SubmodelAccuracy

TINY = Setup(
    (1 / 4, 1.0),
    clients=3,
    per_round=6,
    rounds=4,
    steps=10,
    keep_every=1,
    model={"name": "mlp", "options": {"hidden": [16]}},
    data={"name": "digits", "train_samples": 600, "test_samples": 200, "partition": "dirichlet"},
)


@pytest.mark.slow
def test_a_run_tells_the_accuracy_of_every_size_and_how_masks_move(tmp_path: Path) -> None:
    arm = Federated("tiny", fiarse(TINY, {"min_keep": 4}), measured((1 / 8,)))
    simulation = edgefl.simulate(
        load_federation(None, {**arm.settings, "federation.seed": 1}), tmp_path / "run"
    )
    assert list(simulation.kept) == [1, 2, 3, 4]

    found = arm.measure(simulation)
    judge = SubmodelAccuracy.of(simulation)
    whole = judge.by_class(judge.cut("size1"), simulation.model)
    assert judge.overall(whole) == pytest.approx(found.lines["global 1"][-1][1])
    last = [accuracy for _, accuracy in found.lines["global 1"][-3:]]
    assert found.figures["global 1"] == pytest.approx(np.mean(last))
    assert found.figures["global"] == pytest.approx(
        (found.figures["global 1"] + found.figures["global 1/4"]) / 2
    )
    assert found.figures["global 1"] > 0.5 and 0 <= found.figures["unseen 1/8"] <= 1
    assert 0 < found.figures["local"] <= 1
    assert judge.local("size1", np.ones(10)) == pytest.approx(1)

    moved = accuracies_and_exploration(simulation)
    ever = [share for _, share in moved.lines["ever trained"]]
    assert ever == sorted(ever) and ever[0] > 0.25 and ever[-1] <= 1
    assert moved.figures["explored 1"] == 1 and 0.24 < moved.figures["explored 1/4"] < 1
    assert moved.figures["moved 1 1"] == 0 < moved.figures["moved 1 1/4"] < 1


def test_sizes_are_called_as_the_paper_calls_them() -> None:
    assert [label(gamma) for gamma in (1 / 64, 0.04, 0.25, 0.36, 1.0)] == ["1/64", "0.04", "1/4", "0.36", "1"]


def test_judges_hold_what_the_specification_accepts() -> None:
    results = Results(
        [0, 1, 2],
        {
            "a": [{"small": 0.6, "large": 0.7, "cover": 0.97}] * 3,
            "b": [{"small": 0.3, "large": 0.7, "cover": 0.9}] * 2
            + [{"small": 0.61, "large": 0.7, "cover": 0.9}],
            "a, more": [{"small": 0.8, "large": 0.7}] * 3,
            "b, more": [{"small": 0.4, "large": 0.7}] * 3,
        },
        {"a": [{"line": [(5, 0.2), (10, 0.5)]}] * 3, "b": [{"line": [(5, 0.3), (10, 0.4)]}] * 3},
    )
    assert not mostly_above("a", "b", ("small",))(results).held
    assert above_all("a", ("b",), ("small",), every_seed=False)(results).held
    assert not above_all("a", ("b",), ("small",))(results).held
    assert largest_gap("b", ("a",), "small", "large")(results).held
    assert not largest_gap("a", ("b",), "small", "large")(results).held
    assert reached("a", "cover", 0.95)(results).held and not reached("b", "cover", 0.95)(results).held
    assert sooner("a", "b", ("line",))(results).held and not sooner("b", "a", ("line",))(results).held
    assert larger_lead(("a, more", "a"), ("b, more", "b"), "small")(results).held


def test_steadier_masks_move_less() -> None:
    def run(small: float, large: float) -> dict[str, float]:
        return {"first moved 1 s": 0.2, "first moved 1 l": 0.1, "moved 1 s": small, "moved 1 l": large}

    for small, large, held in ((0.1, 0.05, True), (0.05, 0.06, False), (0.3, 0.05, False)):
        results = Results([0], {"x": [run(small, large)]}, {"x": [{}]})
        assert steadier("x", ("s", "l"), 1)(results).held == held
