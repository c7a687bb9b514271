"""Claims are answered by paired tests over seeds, and planted faults change the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from reproduce.entry import (
    Arm,
    Claim,
    Entry,
    Federated,
    Lead,
    Measurements,
    NotRunError,
    Results,
    larger_lead,
)
from reproduce.runs import Record, Task, results_of, run_arm
from reproduce.verdicts import Answer, holm, one_sided, prediction, verdicts
from tests.support.errors import refuses


def results(**figures: Sequence[float]) -> Results:
    """Return results whose arms have the figure ``x``, a number for each seed."""
    return Results(
        {arm: {seed: Measurements({"x": x}) for seed, x in enumerate(own)} for arm, own in figures.items()}
    )


def answers(claims: Sequence[Claim], found: Results, fewest: int = 3) -> list[Answer]:
    entry = Entry(name="paper/table", title="", claims=claims)
    return [verdict.answer for verdict in verdicts(entry, found, fewest)]


AHEAD = Claim("a is ahead of b", Lead("a", "b", "x"))
BEHIND = Claim("b is ahead of a", Lead("b", "a", "x"))


def test_a_clear_difference_is_reproduced_and_its_opposite_contradicted() -> None:
    found = results(a=[0.6, 0.7, 0.8], b=[0.5, 0.61, 0.69])

    assert answers([AHEAD, BEHIND], found) == ["reproduced", "contradicted"]
    assert answers([AHEAD], results(a=[0.6, 0.7, 0.8], b=[0.5, 0.8, 0.7])) == ["inconclusive"]
    assert answers([AHEAD], found, fewest=4) == ["inconclusive"]
    assert answers([AHEAD], results(a=[0.6, 0.7, 0.8])) == ["not run"]
    assert answers([replace(AHEAD, least=0.2)], found) == ["contradicted"]


@pytest.mark.parametrize(
    ("b", "answer"),
    [
        ([0.501, 0.499, 0.500], "reproduced"),
        ([0.51, 0.49, 0.50], "inconclusive"),
        ([0.55, 0.551, 0.549], "contradicted"),
    ],
)
def test_equal_within_a_margin_needs_the_whole_interval(b: list[float], answer: Answer) -> None:
    assert answers([Claim("equal", Lead("a", "b", "x"), margin=0.01)], results(a=[0.5] * 3, b=b)) == [answer]


def test_the_best_of_all_is_ahead_of_each() -> None:
    found = results(a=[0.6, 0.7, 0.8], b=[0.5, 0.61, 0.69], c=[0.6, 0.71, 0.79])
    best = Claim("a is best", (Lead("a", "b", "x"), Lead("a", "c", "x")))

    assert answers([best], found) == ["inconclusive"]
    worst = Claim("b is best", (Lead("b", "a", "x"), Lead("b", "c", "x")))
    assert answers([worst], found) == ["contradicted"]


def test_of_many_rivals_the_one_that_decides_is_named() -> None:
    behind = {"b": (0.1, 0.11, 0.12), "c": (0.1, 0.3, 0.4), "d": (0.2, 0.21, 0.22), "e": (0.3, 0.31, 0.32)}
    figures = {f"{rival}, high": [0.5 - by for by in all_by] for rival, all_by in behind.items()}
    found = results(**figures, **{"a, high": [0.5] * 3})

    def ours(better: str, *worse: str) -> str:
        leads = [Lead(f"{better}, high", f"{rival}, high", "x") for rival in worse]
        (verdict,) = verdicts(Entry(name="paper/table", title="", claims=[Claim("best", leads)]), found, 3)
        return verdict.ours

    assert ours("a", "b", "c", "d", "e") == "c: +26.67 ± 37.95"
    assert ours("e", "a", "b", "c", "d") == "b: -20.00 ± 0.00"


def test_leads_are_compared_seed_by_seed() -> None:
    found = results(a=[0.6, 0.9, 0.7], b=[0.5, 0.8, 0.6], c=[0.9, 0.5, 0.7], d=[0.7, 0.31, 0.49])

    assert answers([Claim("wider", larger_lead(("c", "d"), ("a", "b"), "x"))], found) == ["reproduced"]


def test_p_values_are_those_of_scipy() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 5))

    holds, fails = one_sided(AHEAD, [a - b])

    assert holds == pytest.approx(stats.ttest_rel(a, b, alternative="greater").pvalue)
    assert fails == pytest.approx(stats.ttest_rel(a, b, alternative="less").pvalue)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_only_common_seeds_count() -> None:
    found = results(a=[0.6, 0.7, 0.8, 0.9], b=[0.5, 0.61, 0.69])

    assert len(Lead("a", "b", "x")(found)) == 3
    with refuses(NotRunError, arm="a", figure="y"):
        found.of("a", "y")


def test_a_prediction_interval_covers_new_runs() -> None:
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2_000):
        published, new = random.normal(size=5), random.normal(size=2)
        low, high = prediction(published, runs=2)
        inside += low <= new.mean() <= high
    assert 0.93 < inside / 2_000 < 0.97


# -- planted faults ----------------------------------------------------------------------------------------


TINY: Mapping[str, object] = {
    "model.name": "mlp",
    "data.name": "digits",
    "federation.rounds": 4,
    "algorithm.lr": 0.1,
    "algorithm.steps": 10,
    "tiers": {"all": {"count": 2, "devices": ["all-*"]}},
}
GOOD, POOR = Federated("good", TINY), Federated("poor", {**TINY, "algorithm.lr": 0.003})
ZEROS = Federated("good", {**TINY, "codec.name": "signsgd", "codec.options": {"alpha": 1e-30}})
"""Sends changes that are 0 in float32."""
CLAIM = Claim("good is ahead of poor", Lead("good", "poor", "accuracy"))


def run(arms: Sequence[Arm], folder: Path) -> list[Record]:
    return [
        run_arm(
            Task(entry="paper/table", arm=arm.name, scale="paper", seed=seed),
            arm,
            folder / arm.name / str(seed),
        )
        for arm in arms
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return run((GOOD, POOR), tmp_path_factory.mktemp("sound"))


def test_sound_runs_reproduce_the_claim(sound: list[Record]) -> None:
    assert answers([CLAIM], results_of(sound)) == ["reproduced"]


def test_rows_that_are_shuffled_between_methods_change_the_verdict(sound: list[Record]) -> None:
    figures = {(record.arm, record.seed): record.figures for record in sound}
    swapped = [
        replace_figures(record, figures[("poor" if record.arm == "good" else "good", 0)])
        if record.seed == 0
        else record
        for record in sound
    ]

    assert answers([CLAIM], results_of(swapped)) == ["inconclusive"]


def replace_figures(record: Record, figures: dict[str, float]) -> Record:
    return Record(**{name: getattr(record, name) for name in record.__struct_fields__} | {"figures": figures})


def test_a_codec_that_sends_zeros_changes_the_verdict(sound: list[Record], tmp_path: Path) -> None:
    planted = [*run((ZEROS,), tmp_path), *(record for record in sound if record.arm == "poor")]

    assert answers([CLAIM], results_of(planted)) == ["contradicted"]


def test_permuted_test_labels_change_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgefl.api import simulate
    from edgefl.data.dataset import Dataset

    opened = simulate.open_data

    def permuted(*args: object, **options: object) -> Dataset:
        data = opened(*args, **options)
        return replace(data, test_y=np.random.default_rng(0).permutation(data.test_y))

    monkeypatch.setattr(simulate, "open_data", permuted)

    assert answers([CLAIM], results_of(run((GOOD, POOR), tmp_path))) == ["inconclusive"]
