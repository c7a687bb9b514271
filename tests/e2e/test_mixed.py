"""One model, seven ways to hold a part of it: devices of different submodel kinds train together over a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ENGINES, SMALL, Calm, on_both_engines, run_to_the_end

pytestmark = pytest.mark.e2e
ROUNDS = 3

_TIERS = """
[tiers.strong]
count = 1
[tiers.weak]
cut = 3
chunks = 2
count = 1
[tiers.half]
kind = "width"
gamma = 0.25
count = 1
[tiers.rolling]
kind = "width"
gamma = 0.25
options = { rolling = true }
count = 1
[tiers.ordered]
kind = "width"
gamma = 0.36
options = { ordered = true }
count = 1
[tiers.sparse]
kind = "importance"
gamma = 0.25
count = 1
[tiers.channels]
kind = "importance_structured"
gamma = 0.25
count = 1
"""
MIXED = (
    SMALL[: SMALL.index("[tiers.strong]")].replace("[program]", '[program]\nname = "tcbgd"')
    + _TIERS
    + '[downlink]\ncompression = "none"\n'  # sizes in both directions are compared
    + SMALL[SMALL.index("[limits]") :]
)


@pytest.fixture(scope="module", params=ENGINES)
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """A run nobody disturbs, on each engine."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return Calm.of(request.param, folder, ["--rounds", str(ROUNDS), "--seed", "7"], MIXED)


def test_devices_of_all_kinds_train_one_model(calm: Calm) -> None:
    assert [(row["reports"], row["rejected"]) for row in calm.rounds] == [(7, 0)] * ROUNDS
    assert calm.rounds[-1]["train_loss"] < calm.rounds[0]["train_loss"]


def test_a_quarter_of_the_parameters_is_about_a_quarter_of_the_traffic(calm: Calm) -> None:
    devices = calm.rounds[-1]["devices"]
    up = {name: row["up_bytes"] for name, row in devices.items()}
    for name in ("half-0", "rolling-0", "sparse-0", "channels-0"):
        assert up[name] < 0.6 * up["strong-0"], "names and headers weigh on a model as small as this"
    assert devices["sparse-0"]["down_bytes"] > up["sparse-0"], "the mask travels down only"


def test_killed_devices_of_other_kinds_change_no_bit_of_the_model(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    for name in ("sparse-0", "rolling-0", "channels-0", "server"):
        run.kill(name)

    assert run.finish()[-1]["weights_sha256"] == calm.weights_sha256


EXITS = """
[federation]
name = "e2e"
[model]
name = "edgefl.models.exits:early_exits"
options = { base = "resnet8", widths = [4, 8, 16] }
[program]
name = "multi_exit"
batch = 8
steps = 6
options = { kd_weight = 0.05 }
[data]
name = "digits"
train_samples = 240
test_samples = 200
[tiers.deep]
kind = "early_exit"
count = 1
[tiers.shallow]
kind = "early_exit"
options = { exit = 2 }
count = 1
[tiers.thin]
kind = "early_exit"
gamma = 0.1
count = 1
[tiers.sparse]
kind = "importance"
gamma = 0.25
count = 1
"""


@on_both_engines
def test_early_exits_train_beside_importance_and_distil_after_a_quarter_of_the_rounds(
    tmp_path: Path, engine: str
) -> None:
    arguments = ["--rounds", "4", "--seed", "7", "--engine", engine]
    rounds = run_to_the_end(tmp_path / "run", arguments, EXITS)
    assert [(row["reports"], row["rejected"]) for row in rounds] == [(4, 0)] * 4
    up = {name: row["up_bytes"] for name, row in rounds[-1]["devices"].items()}
    assert up["thin-0"] < up["shallow-0"] < up["deep-0"]
