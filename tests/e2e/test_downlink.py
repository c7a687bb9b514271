"""A mixed fleet whose weights travel down as changes in int8: a quarter of the bytes, and no bit lost to a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Calm
from tests.e2e.shared import made_once

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUNDS = 6
CONFIG = """
[federation]
name = "e2e"
[model]
name = "resnet8"
[algorithm]
name = "tcbgd"
batch = 16
steps = 8
[data]
name = "digits"
train_samples = 800
test_samples = 400
[downlink]
encoding = "int8"
keyframe_every = 4
[tiers.strong]
count = 1
[tiers.weak]
cut = 3
chunks = 2
engine = "executorch"
count = 1
[tiers.half]
kind = "width"
engine = "executorch"
gamma = 0.25
count = 1
[tiers.sparse]
kind = "importance"
gamma = 0.25
count = 1
[limits]
checkpoint_steps = 1
ack_timeout_s = 3
"""
ARGUMENTS = ["--rounds", str(ROUNDS), "--seed", "7"]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """A run nobody disturbs."""
    with made_once(tmp_path_factory, "downlink") as folder:
        return Calm.of(folder / "run", ARGUMENTS, CONFIG)


def test_the_fleet_learns_from_what_it_is_given(calm: Calm) -> None:
    rounds = calm.rounds
    assert [(row["reports"], row["rejected"]) for row in rounds] == [(4, 0)] * ROUNDS
    assert rounds[-1]["train_loss"] < 0.8 * rounds[0]["train_loss"]
    assert rounds[-1]["accuracy"] > 0.3, [row["accuracy"] for row in rounds]


def test_a_device_that_stays_downloads_less_than_a_third_and_a_half(calm: Calm) -> None:
    rounds = calm.rounds
    whole = (calm.folder / "model.safetensors").stat().st_size
    for number in (2, 3, 4, 6):  # round 5 begins with a keyframe
        devices = rounds[number - 1]["devices"]
        down = {name: row["down_bytes"] for name, row in devices.items()}
        ratios = {
            "strong-0": whole / down["strong-0"],
            "weak-0": whole / down["weak-0"],
            "half-0": devices["half-0"]["up_bytes"] / down["half-0"],  # the update is the payload in float32
        }
        print(f"round {number}: down {down}, smaller than float32 by {ratios}")
        assert min(ratios.values()) > 3.5, ratios
        assert down["sparse-0"] < 0.8 * devices["sparse-0"]["up_bytes"], "half as much, and the mask"
    assert rounds[4]["devices"]["strong-0"]["down_bytes"] > 3 * rounds[3]["devices"]["strong-0"]["down_bytes"]


def test_bytes_with_headers_are_a_little_more(calm: Calm) -> None:
    for row in calm.rounds:
        assert row["up_bytes"] < row["up_wire_bytes"] < 1.05 * row["up_bytes"]
        assert row["down_bytes"] < row["down_wire_bytes"] < 1.25 * row["down_bytes"]
        assert row["up_bytes"] >= sum(device["up_bytes"] for device in row["devices"].values())
        assert row["down_bytes"] == sum(device["down_bytes"] for device in row["devices"].values())


def test_a_server_and_devices_killed_between_keyframes_change_no_bit(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    run.wait_until(lambda: len(run.rounds) >= 2, "second round")
    run.kill("server", "strong-0", "half-0")
    run.wait_until(lambda: len(run.rounds) >= 4, "fourth round")
    run.kill("server")

    assert run.finish()[-1]["weights_sha256"] == calm.weights_sha256
