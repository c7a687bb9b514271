"""Every algorithm of the catalog over a real broker, with one device on each engine; some of them killed and started
again."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.contract.algorithm import Algorithm
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.conftest import BrokerProcess
from tests.e2e.inside import Trained, train
from tests.e2e.runs import TINY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MODEL = 'name = "mlp"\noptions = { hidden = [8] }'
TIERS = """
[tiers.all]
kind = "{kind}"
count = 1
[tiers.phone]
kind = "{kind}"
engine = "executorch"
count = 1
"""
OTHER_MODELS = {
    "multi_exit": 'name = "edgefl.models.exits:early_exits"\noptions = { base = "resnet8", widths = [2, 4, 4] }',
    "fedbn": 'name = "resnet8"\noptions = { widths = [2, 4, 4] }',
}
PASSING = {("local_amsgrad", "m")}
"""Memory that is 0 between rounds: what travels there is used up by the server's step."""
KEEPING = {"scaffold": "all-0", "fafed": "phone-0", "local": "all-0", "fedrep": "phone-0"}
"""Algorithms whose devices keep something that nobody else has, and the device that is killed: one on each engine."""


def config(name: str, federation: str) -> str:
    kind = "early_exit" if name == "multi_exit" else "output_side"
    text = TINY.replace('"e2e"', f'"{federation}"').replace(MODEL, OTHER_MODELS.get(name, MODEL))
    return text.replace("batch = 8", f'name = "{name}"\nbatch = 8\nlr = 0.02') + TIERS.format(kind=kind)


def algorithm_of(name: str) -> Algorithm | None:
    """The algorithm of the small model; None where it is for other models."""
    if name in OTHER_MODELS:
        return None
    spec = build_model("mlp", in_channels=1, size=8, hidden=[8])
    return algorithms.build(name, Objective.of(OutputSide(spec, 0)), batch=8, steps=3)


def rounds_for(algorithm: Algorithm | None) -> int:
    """Every exchange, and the one of every round twice at least."""
    return 2 if algorithm is None else len(algorithm.opening) + 2 * (len(algorithm.ahead) + 1)


def check_rounds(trained: Trained, rounds: int) -> None:
    assert [closed.round for closed in trained.rounds] == list(range(1, rounds + 1))
    assert trained.outcomes == [("closed", 2, 0)] * rounds
    for closed in trained.rounds:
        assert all(math.isfinite(value or 0.0) for value in (closed.loss, closed.accuracy, closed.train_loss))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_trains_over_mqtt_and_moves_what_the_server_keeps(
    name: str, mosquitto: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    algorithm = algorithm_of(name)
    rounds = rounds_for(algorithm)

    trained = train(tmp_path / "run", config(name, federation), mosquitto.address, federation, rounds)

    check_rounds(trained, rounds)
    kept = load_file(tmp_path / "run" / "checkpoints" / f"round-{rounds:04}.safetensors")
    model = load_file(tmp_path / "run" / "model.safetensors")
    for state, begins in (algorithm.server_state if algorithm else {}).items():
        tensors = {key: array for key, array in kept.items() if key.startswith(f"{state}/")}
        assert len(tensors) == len(model), f"one tensor of {state} for each parameter"
        moved = any(not np.array_equal(array, np.full_like(array, begins)) for array in tensors.values())
        assert moved == ((name, state) not in PASSING), state
        assert all(np.isfinite(array).all() for array in tensors.values())


@pytest.mark.parametrize("name", KEEPING)
def test_a_killed_device_resumes(
    name: str, mosquitto: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    """The processes end with the bits of the same federation in threads."""
    text, rounds = config(name, federation), 5
    calm = train(tmp_path / "calm", text, mosquitto.address, federation, rounds)
    shutil.copytree(calm.folder / "bundles", tmp_path / "killed" / "bundles")
    run = Run.start(tmp_path / "killed", ["--rounds", str(rounds), "--seed", "7"], text)
    run.wait_until(lambda: len(run.rounds) >= 2, "second round")
    run.kill(KEEPING[name])

    rows = run.finish()

    assert [row["reports"] for row in rows] == [2] * rounds
    assert rows[-1]["weights_sha256"] == calm.rounds[-1].weights_sha256
    assert rows[-1]["train_loss"] == calm.rounds[-1].train_loss, (
        "a model that nobody sends is seen in its loss alone"
    )
