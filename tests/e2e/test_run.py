"""The main job as a user runs it: real broker, real processes, killed and started again."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conftest import require_mosquitto
from tests.e2e.runs import ENGINES, PATIENCE_S, SMALL, Calm, Run, run_to_the_end

pytestmark = pytest.mark.e2e
ROUNDS = 5
PLACES = [
    ("onnx", "amqtt"),
    ("onnx", "mosquitto"),
    pytest.param("executorch", "amqtt", marks=pytest.mark.slow),
]
"""Engines and brokers on which processes are killed: what an engine keeps of a round is the same over every broker."""


on = pytest.mark.parametrize(("calm", "broker"), PLACES, indirect=["calm"])


@pytest.fixture(scope="module")
def calm_onnx(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return undisturbed("onnx", tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def calm_executorch(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return undisturbed("executorch", tmp_path_factory.mktemp("executorch"))


def undisturbed(engine: str, folder: Path) -> Calm:
    return Calm.of(engine, folder / "run", ["--rounds", str(ROUNDS), "--seed", "7"])


@pytest.fixture(params=ENGINES)
def calm(request: pytest.FixtureRequest) -> Calm:
    """The run of an engine, undisturbed: one for all tests, in whatever order they ask for engines."""
    found: Calm = request.getfixturevalue(f"calm_{request.param}")
    return found


def test_run_prints_one_json_object_per_round_and_the_seed_decides_the_weights(
    tmp_path: Path, calm: Calm
) -> None:
    again = run_to_the_end(tmp_path / "again", calm.arguments)
    other = calm.beside(tmp_path / "other", "--rounds", "1", "--seed", "8").finish()

    assert [row["round"] for row in again] == [1, 2, 3, 4, 5]
    assert again[-1]["weights_sha256"] == calm.weights_sha256
    assert other[-1]["weights_sha256"] != again[0]["weights_sha256"]
    assert all(row["reports"] == 3 and row["rejected"] == 0 for row in again)
    assert len(load_file(tmp_path / "again" / "model.safetensors")) > 10


def test_run_over_mosquitto_gives_the_same_weights(tmp_path: Path, calm: Calm) -> None:
    require_mosquitto()
    rounds = calm.beside(tmp_path / "m", "--broker", "mosquitto").finish()

    assert rounds[-1]["weights_sha256"] == calm.weights_sha256


@on
@pytest.mark.parametrize("victim", ["device in training", "device in upload", "server", "broker"])
def test_a_killed_process_changes_nothing(tmp_path: Path, calm: Calm, victim: str, broker: str) -> None:
    if broker == "mosquitto":
        require_mosquitto()
    run = calm.beside(tmp_path / "run", "--broker", broker)
    run.wait_until(lambda: len(run.rounds) >= 2, "second round")

    if victim == "device in training":
        run.wait_until(lambda: _rows(run, "weak-0", "checkpoint") == 1, "checkpoint of weak-0")
        run.kill("weak-0")
    elif victim == "device in upload":
        run.wait_until(lambda: _rows(run, "strong-0", "outbox") == 1, "update in the outbox of strong-0")
        run.kill("strong-0")
    else:
        run.kill(victim)

    rounds = run.finish()
    assert [row["round"] for row in rounds] == [1, 2, 3, 4, 5]
    assert rounds[-1]["weights_sha256"] == calm.weights_sha256


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

    rounds = Run.start(first.folder, calm.arguments).finish()

    assert rounds[-1]["round"] == ROUNDS
    assert rounds[-1]["weights_sha256"] == calm.weights_sha256


def test_a_device_that_hangs_does_not_block_a_round(tmp_path: Path, calm: Calm) -> None:
    config = SMALL.replace(
        "[limits]", "[limits]\nround_deadline_s = 20\nkeepalive_s = 2\noffline_grace_s = 0"
    )
    run = calm.beside(tmp_path / "run", "--rounds", "4", config=config)
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    os.kill(run.pids()["weak-0"], signal.SIGSTOP)

    rounds = run.finish()
    assert len(rounds) == 4
    assert rounds[-1]["reports"] == 2


def test_damaged_local_data_end_the_run_with_a_clear_message(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run", "--rounds", "50")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    (run.folder / "devices" / "weak-0" / "data.npz").write_bytes(b"gone")
    run.kill("weak-0")

    assert run.process.wait(PATIENCE_S) != 0
    assert "cannot be read as training data" in run.errors()


def _rows(run: Run, device: str, table: str) -> int:
    store = run.folder / "devices" / device / "store" / "store.sqlite3"
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=0.1)) as db,
    ):
        return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
    return 0
