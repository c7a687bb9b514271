"""A simulation selects its clients as a server does, goes on with what it knew of them, and waits for a quorum."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgefl
from edgefl.api.simulate import Simulation
from edgefl.errors import ParticipationError
from tests.simulator.small import federation, in_halves

LOSSY: dict[str, dict[str, object]] = {
    "federation": {"rounds": 6},
    "round": {"fraction": 0.5, "min_reports": 2, "evaluate_every": 0},
    "simulation": {"step_ms": 10, "tiers": {"weak": {"dropout": 0.5}}},
    "selection": {"policy": "longest-idle", "measured": True},
}


@pytest.mark.slow
def test_a_stopped_run_selects_the_same_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", 0.0)
    chosen = federation(**LOSSY)
    whole = edgefl.simulate(chosen, tmp_path / "whole")
    halves = in_halves(3, chosen, tmp_path / "halves")

    def told(made: Simulation) -> list[tuple[str, int, float | None]]:
        return [(row.weights_sha256, row.selected, row.fairness) for row in made.history]

    assert told(halves) == told(whole)
    assert max(row.selected for row in whole.history) > 3, "some were lost, and more were selected after"
    assert whole.history[-1].fairness is not None


def test_a_round_whose_quorum_is_not_likely_begins_when_patience_is_over(tmp_path: Path) -> None:
    lossy = {
        "round": {"min_reports": 6, "evaluate_every": 0},
        "simulation": {"step_ms": 10, "dropout": 0.5},
        "selection": {"quorum": 0.9, "patience_s": 500},
    }
    with pytest.raises(ParticipationError, match="none has trained the model"):
        edgefl.simulate(federation(federation={"rounds": 3, "seed": 2}, **lossy), tmp_path / "out")
    made = Simulation(tmp_path / "out")
    assert [row.outcome for row in made.history] == ["abandoned"] * 3, "it has six clients, and needs more"
