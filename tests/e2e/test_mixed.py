"""One model, seven ways to hold a part of it: devices of different submodel kinds train together over a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Calm, run_to_the_end
from tests.e2e.shared import made_once

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUNDS = 3

# Each kind on one of the engines: what every kind is on each of them, tests/submodels and tests/exporters show.
MIXED = """
[federation]
name = "e2e"
[model]
name = "resnet8"
options = { widths = [4, 8, 16] }
[algorithm]
name = "tcbgd"
batch = 8
steps = 6
[data]
name = "digits"
train_samples = 240
test_samples = 200
[downlink]
compression = "none"  # sizes in both directions are compared
[limits]
checkpoint_steps = 1
ack_timeout_s = 3
[tiers.strong]
count = 1
[tiers.weak]
cut = 3
chunks = 2
count = 1
[tiers.half]
kind = "width"
gamma = 0.25
engine = "executorch"
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
engine = "executorch"
count = 1
[tiers.sparse]
kind = "importance"
gamma = 0.25
count = 1
[tiers.channels]
kind = "importance_structured"
gamma = 0.25
engine = "executorch"
count = 1
"""


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """A run nobody disturbs."""
    with made_once(tmp_path_factory, "kinds") as folder:
        return Calm.of(folder / "run", ["--rounds", str(ROUNDS), "--seed", "7"], MIXED)


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
    run.kill("sparse-0", "rolling-0", "channels-0", "server")

    assert run.finish()[-1]["weights_sha256"] == calm.weights_sha256


EXITS = """
[federation]
name = "e2e"
[model]
name = "edgefl.models.exits:early_exits"
options = { base = "resnet8", widths = [4, 8, 16] }
[algorithm]
name = "multi_exit"
batch = 8
steps = 6
kd_weight = 0.05
[data]
name = "digits"
train_samples = 240
test_samples = 200
[tiers.deep]
kind = "early_exit"
count = 1
[tiers.shallow]
kind = "early_exit"
engine = "executorch"
options = { exit = 2 }
count = 1
[tiers.thin]
kind = "early_exit"
engine = "executorch"
gamma = 0.1
count = 1
[tiers.sparse]
kind = "importance"
gamma = 0.25
count = 1
"""


def test_early_exits_train_beside_importance(tmp_path: Path) -> None:
    rounds = run_to_the_end(tmp_path / "run", ["--rounds", "4", "--seed", "7"], EXITS)
    assert [(row["reports"], row["rejected"]) for row in rounds] == [(4, 0)] * 4
    up = {name: row["up_bytes"] for name, row in rounds[-1]["devices"].items()}
    assert up["thin-0"] < up["shallow-0"] < up["deep-0"]
