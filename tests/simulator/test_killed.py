"""A simulation that is killed at any moment goes on to the bits of one that was not."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.config.text import dump
from edgefl.setup.tiers import completed
from tests.simulator.small import federation
from tests.support.commands import run_command

SAVED = "edgefl_server.storage.checkpoints:Checkpoints.save"
COMMITTED = "edgefl.simulator.carries:CarryStore.commit"
KEPT = "edgefl.simulator.carries:CarryStore.keep"
PUBLISHED = "edgefl.simulator.downlink:SimulatedDownlink.publish"
FINISHED = "edgefl_server.storage.checkpoints:Checkpoints.finish"
OF_STATE: dict[str, dict[str, object]] = {
    "algorithm": {"name": "scaffold"},
    "tiers": {"weak": {"cut": 0, "count": 1}},
    "simulation": {"step_ms": 100, "watts": 2, "spread": 0.5, "dropout": 0.2},
    "tracking": {"tensorboard": True},
    "limits": {"round_deadline_s": 9},
}
PATCHED: dict[str, dict[str, object]] = {"downlink": {"encoding": "int8"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kills"),
    [
        pytest.param(OF_STATE, [(SAVED, 2)], id="a model that nothing names yet"),
        pytest.param(
            OF_STATE,
            [(KEPT, 7), (COMMITTED, 1), (COMMITTED, 1)],
            marks=pytest.mark.slow,
            id="in the midst of rounds",
        ),
        pytest.param(
            OF_STATE, [(FINISHED, 1)], marks=pytest.mark.slow, id="all but the table and the pictures"
        ),
        pytest.param(
            PATCHED,
            [(PUBLISHED, 3), (SAVED, 1), (PUBLISHED, 2)],
            marks=pytest.mark.slow,
            id="patches of int8",
        ),
    ],
)
def test_one_that_was_killed_goes_on_to_the_same_bits(
    changes: dict[str, dict[str, object]], kills: list[tuple[str, int]], tmp_path: Path
) -> None:
    chosen = completed(federation(**changes, federation={"rounds": 5}))
    whole = edgefl.simulate(chosen, tmp_path / "whole")
    (tmp_path / "federation.toml").write_text(dump(chosen))
    out = tmp_path / "killed"
    for place, calls in kills:
        command = [
            sys.executable,
            "-m",
            "tests.simulator.killed",
            tmp_path / "federation.toml",
            out,
            place,
            calls,
        ]
        ended = run_command(*command)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        with (out / "rounds.jsonl").open("ab") as file:
            file.write(b'{"round":4,"outcome":"clo')  # half a line
    made = edgefl.simulate(chosen, out, resume=True)

    assert [row.weights_sha256 for row in made.history] == [row.weights_sha256 for row in whole.history]
    assert [row.energy_j for row in made.history] == [row.energy_j for row in whole.history]
    assert (out / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.folder.iterdir()}
