"""Versions that wait for nobody, simulated: whoever trains them and however they are cut, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgefl
from edgefl.simulator.results import RoundRow
from tests.rings.rows import mostly_slow
from tests.simulator.small import federation
from tests.support.errors import ConfigError, ParticipationError, refuses

Tables = dict[str, dict[str, object]]
LATE: Tables = {
    "round": {"mode": "buffered", "buffer": 3, "concurrency": 5, "max_staleness": 3},
    "federation": {"rounds": 5},
    "simulation": {"step_ms": 10, "tiers": {"weak": {"step_ms": 45}}},
}
CASES: dict[str, Tables] = {
    "one bit, with what each client kept of it": {"codec": {"name": "ef_signsgd"}},
    "from rounded weights, by samples, who changed it": {
        "downlink": {"encoding": "float16"},
        "round": {"weighting": "samples", "count": "nonzero"},
    },
    "a slice of each layer, clipped, by a server's own step": {
        "tiers": {"weak": {"kind": "width", "cut": 0, "options": {"gamma": 0.5}, "count": 2}},
        "aggregate": {"clip_norm": 0.05},
        "optimizer": {"name": "fedadam"},
    },
}


def of(*tables: Tables) -> edgefl.config.Federation:
    merged: Tables = {}
    for each in (LATE, *tables):
        for name, table in each.items():
            merged[name] = {**merged.get(name, {}), **table}
    return federation(**merged)


def bits(rows: tuple[RoundRow, ...]) -> list[tuple[object, ...]]:
    return [(row.weights_sha256, row.train_loss, row.reports, row.simulated_s, row.staleness) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_slow(CASES, ["one bit, with what each client kept of it"]))
def test_the_same_bits_again_and_with_two_workers(case: str, tmp_path: Path) -> None:
    tables = of(CASES[case])
    one = edgefl.simulate(tables, tmp_path / "one").history
    two = edgefl.simulate(tables, tmp_path / "two", workers=2).history
    assert bits(one) == bits(two) and len(one) == 5
    assert all(row.outcome == "closed" and row.reports == 3 for row in one)
    assert max(row.staleness for row in one) > 0


@pytest.mark.slow
def test_a_version_is_there_as_soon_as_its_updates_are(tmp_path: Path) -> None:
    waits = {"round": {"mode": "synchronous", "buffer": 10, "concurrency": 0, "max_staleness": 20}}
    rounds = edgefl.simulate(of(waits), tmp_path / "waits").history
    versions = edgefl.simulate(of(), tmp_path / "goes-on").history
    assert [row.simulated_s for row in rounds] == pytest.approx([0.09] * 5)  # two steps of the slowest
    first, *later = (row.simulated_s for row in versions)
    assert first == pytest.approx(0.02) and sum(later) < 4 * 0.05
    assert sum(row.energy_j for row in versions) == 0.0


def test_what_comes_too_many_versions_late_is_not_in_any(tmp_path: Path) -> None:
    fresh = edgefl.simulate(of({"round": {"max_staleness": 0}}), tmp_path / "fresh").history
    assert {row.staleness for row in fresh} == {0.0}


@pytest.mark.slow
def test_the_share_of_late_changes_is_in_the_weights(tmp_path: Path) -> None:
    rows = [
        edgefl.simulate(of({"round": {"staleness": rule}}), tmp_path / rule).history
        for rule in ("sqrt", "constant")
    ]
    first_late = next(row.round for row in rows[0] if row.staleness)
    same = [one.weights_sha256 == two.weights_sha256 for one, two in zip(*rows, strict=True)]
    assert same == [row.round < first_late for row in rows[0]]


def test_clients_that_are_never_ready_in_time_end_it(tmp_path: Path) -> None:
    lost: Tables = {"simulation": {"step_ms": 10, "dropout": 1.0}}
    with refuses(ParticipationError, round=1, goal=3):
        edgefl.simulate(of(lost), tmp_path / "lost")


def test_it_is_not_taken_up(tmp_path: Path) -> None:
    edgefl.simulate(of(), tmp_path / "done")
    with pytest.raises(ConfigError, match="cannot be taken up"):
        edgefl.simulate(of(), tmp_path / "done", resume=True)
