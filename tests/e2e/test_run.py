"""The main job as a user runs it: real broker, real processes, killed and started again."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.lab.lab import discard
from edgefl.wire.bundle.archive import read_bundle
from tests import needs
from tests.e2e.conftest import FLEET, ROUNDS
from tests.e2e.inside import edgefl, in_a_process, refused
from tests.e2e.runs import PATIENCE_S, Calm, Run, carried, journaled, rows, run_to_the_end
from tests.server.torch_process.processes import torch_process_of

pytestmark = pytest.mark.e2e
DEVICES = ("strong-0", "weak-0", "half-0")


def test_a_run_prints_a_row_for_each_round_and_every_device_reports(calm: Calm) -> None:
    assert [row["round"] for row in calm.rounds] == list(range(1, ROUNDS + 1))
    assert [(row["outcome"], row["reports"], row["rejected"]) for row in calm.rounds] == [
        ("closed", 3, 0)
    ] * ROUNDS
    assert all(set(row["devices"]) == set(DEVICES) for row in calm.rounds)
    assert all(math.isfinite(row[key]) for row in calm.rounds for key in ("loss", "accuracy", "train_loss"))


def test_the_model_moves_in_each_round_and_is_learning(calm: Calm) -> None:
    assert len({row["weights_sha256"] for row in calm.rounds}) == ROUNDS
    assert calm.rounds[-1]["train_loss"] < calm.rounds[0]["train_loss"]
    assert {array.dtype for array in calm.model().values()} == {np.dtype(np.float32)}


def test_each_tier_was_exported_for_its_own_engine(calm: Calm) -> None:
    files = {path.name: read_bundle(path).manifest for path in (calm.folder / "bundles").glob("*.efl")}

    assert {name: (manifest.tier, manifest.format) for name, manifest in files.items()} == {
        "strong.efl": ("strong", "onnx"),
        "half.efl": ("half", "onnx"),
        "weak.executorch.efl": ("weak", "executorch"),
    }


def test_a_bit_per_entry_travels_up_and_a_byte_down_but_for_keyframes(calm: Calm) -> None:
    # An update that is sent again is counted again: on a busy machine some are.
    up = {name: min(row["devices"][name]["up_bytes"] for row in calm.rounds) for name in DEVICES}
    down = [row["devices"]["strong-0"]["down_bytes"] for row in calm.rounds]
    whole = sum(array.nbytes for array in calm.model().values())

    assert up["half-0"] < up["strong-0"] < whole / 6
    assert max(down[1], down[2], down[3], down[5]) < whole / 2.5
    assert down[0] > down[4] > 2 * down[3], "the bundle is fetched once, and round 5 begins with a keyframe"


def test_bytes_with_headers_are_more_than_those_without(calm: Calm) -> None:
    for row in calm.rounds:
        assert row["up_bytes"] < row["up_wire_bytes"] < 1.5 * row["up_bytes"]
        assert row["down_bytes"] < row["down_wire_bytes"] < 1.5 * row["down_bytes"]
        assert row["up_bytes"] >= sum(device["up_bytes"] for device in row["devices"].values())
        assert row["down_bytes"] == sum(device["down_bytes"] for device in row["devices"].values())


@pytest.mark.slow
def test_processes_that_are_killed_in_mid_round_change_no_bit(tmp_path: Path, calm: Calm) -> None:
    """Over another broker, too. Rounds depend on the residuals and the int8 model that devices have, and a server's model
    on its torch process."""
    needs.require("mosquitto")
    run = calm.beside(tmp_path / "run", "--broker-kind", "mosquitto")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    _kill_torch_process(run)
    run.wait_until(
        lambda: rows(run, "weak-0", "checkpoint") > 0 or len(run.rounds) >= 3, "training of weak-0"
    )
    run.pause("weak-0")  # from here on no round can close
    run.wait_until(lambda: journaled(run) == 2, "updates of the two others in the journal")
    run.kill("server", "weak-0")
    run.wait_until(lambda: len(run.rounds) >= 4, "fourth round")
    run.kill("broker", "half-0")
    _kill_torch_process(run)  # of the second server

    again = run.finish()

    assert [row["weights_sha256"] for row in again] == [row["weights_sha256"] for row in calm.rounds]
    told = ("reports", "train_loss", "accuracy", "loss")
    assert [[row[key] for key in told] for row in again] == [
        [row[key] for key in told] for row in calm.rounds
    ]
    for device in DEVICES:
        residual, expected = carried(run.folder, device), carried(calm.folder, device)
        assert residual.keys() == expected.keys() and all(name.startswith("residual.") for name in residual)
        assert all(np.array_equal(residual[name], expected[name]) for name in residual)
        assert any(array.any() for array in residual.values())


def _kill_torch_process(run: Run) -> None:
    run.wait_until(lambda: torch_process_of(run.pids()["server"]) > 0, "process that computes with models")
    os.kill(torch_process_of(run.pids()["server"]), signal.SIGKILL)


@pytest.mark.slow
def test_bundles_exported_again_give_the_same_run(tmp_path: Path, calm: Calm) -> None:
    again = run_to_the_end(tmp_path / "again", calm.arguments, FLEET)
    other = calm.beside(tmp_path / "other", "--rounds", "1", "--seed", "8").finish()

    assert again[-1]["weights_sha256"] == calm.weights_sha256
    assert other[-1]["weights_sha256"] != again[0]["weights_sha256"]


@pytest.mark.slow
def test_a_device_killed_in_upload_changes_nothing(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    run.wait_until(lambda: rows(run, "strong-0", "outbox") == 1, "update in the outbox of strong-0")
    run.kill("strong-0")

    assert run.finish()[-1]["weights_sha256"] == calm.weights_sha256


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path, calm: Calm) -> None:
    first = calm.beside(tmp_path / "run")
    first.wait_until(lambda: len(first.rounds) >= 2, "second round")
    pids = first.pids()
    first.process.kill()
    first.process.wait()
    deadline = time.monotonic() + 300
    while left := [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} outlived the run"
        time.sleep(0.05)

    again = Run.start(first.folder, calm.arguments, FLEET).finish()

    assert again[-1]["round"] == ROUNDS
    assert again[-1]["weights_sha256"] == calm.weights_sha256


@pytest.mark.slow
def test_a_device_that_hangs_does_not_block_a_round(tmp_path: Path, calm: Calm) -> None:
    config = FLEET.replace(
        "[limits]", "[limits]\nround_deadline_s = 20\nkeepalive_s = 2\noffline_grace_s = 0"
    )
    run = calm.beside(tmp_path / "run", "--rounds", "4", config=config)
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    os.kill(run.pids()["weak-0"], signal.SIGSTOP)

    again = run.finish()
    assert len(again) == 4
    assert again[-1]["reports"] == 2


@pytest.mark.slow
def test_damaged_local_data_end_the_run_with_a_clear_message(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run", "--rounds", "500")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    (run.folder / "devices" / "weak-0" / "data.npz").write_bytes(b"gone")
    os.kill(run.pids()["weak-0"], signal.SIGKILL)

    assert run.process.wait(PATIENCE_S) != 0
    assert "is no .npz archive" in run.errors()


@pytest.fixture
def finished(tmp_path: Path, calm: Calm) -> Path:
    """A copy of the folder of a finished run, and a file of somebody's own in it."""
    folder = tmp_path / "run"
    shutil.copytree(calm.folder, folder)
    (folder / "thesis.tex").write_text("years of work")
    (tmp_path / "federation.toml").write_text(calm.config)
    return folder


def test_a_finished_run_is_not_overwritten(tmp_path: Path, finished: Path, calm: Calm) -> None:
    before = (finished / "model.safetensors").read_bytes()

    again = edgefl("run", tmp_path / "federation.toml", "--out", finished, *calm.arguments)

    refused(again, ConfigError, "finished run", "--fresh")
    assert (finished / "model.safetensors").read_bytes() == before


def test_what_is_discarded_is_what_a_run_left_and_nothing_else(finished: Path) -> None:
    assert {"devices", "journal.sqlite", "model.safetensors"} <= {path.name for path in finished.iterdir()}

    discard(finished)

    locks = {"run.lock", "serve.lock"}  # they stay: without its file two processes could hold one lock
    assert {path.name for path in finished.iterdir()} - locks == {"thesis.tex"}


@pytest.mark.slow
def test_a_fresh_run_begins_in_the_folder_of_a_finished_one(tmp_path: Path, finished: Path) -> None:
    arguments = ("--rounds", "1", "--out", finished, "--json", "--fresh")

    again = in_a_process("run", tmp_path / "federation.toml", *arguments)

    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == 1
    assert (finished / "thesis.tex").exists()
