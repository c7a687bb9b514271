"""Every program of the catalog as a user runs it: over MQTT, with a server and devices in processes of their own."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl import programs
from edgefl.contract.program import Program
from edgefl.models.zoo import catalog as zoo
from edgefl.objective.objective import Objective
from edgefl.programs.catalog import PROGRAMS
from edgefl.submodels.output_side.submodel import OutputSide
from tests.e2e.runs import Run, run_to_the_end

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MODEL = 'name = "mlp"\noptions = { hidden = [8] }'
CONFIG = """
[federation]
name = "programs"
[model]
{model}
[program]
batch = 8
steps = 3
lr = 0.02
[data]
name = "digits"
train_samples = 90
test_samples = 100
[tiers.{tier}]
kind = "{kind}"
count = 2
[limits]
checkpoint_steps = 1
"""
OTHER_MODELS = {
    "multi_exit": 'name = "edgefl.models.exits:early_exits"\noptions = { base = "resnet8", widths = [2, 4, 4] }'
}
PASSING = {("local_amsgrad", "m")}
"""Memory that is 0 between rounds: what travels there is used up by the server's step."""
on_both_engines = pytest.mark.parametrize("engine", ["onnx", "executorch"])
KEEPING = ("scaffold", "fafed", "local")
"""Programs whose devices keep something that nobody else has."""


def config(name: str) -> str:
    kind = "early_exit" if name in OTHER_MODELS else "output_side"
    return CONFIG.format(model=OTHER_MODELS.get(name, MODEL), tier="all", kind=kind)


def program_of(name: str) -> Program | None:
    """The program of the small model; None where it is for other models."""
    if name in OTHER_MODELS:
        return None
    spec = zoo.build("mlp", in_channels=1, size=8, hidden=[8])
    return programs.build(name, Objective.of(OutputSide(spec, 0)), batch=8, steps=3)


def rounds_for(program: Program | None) -> int:
    """Every exchange, and the one of every round twice at least."""
    return 2 if program is None else len(program.opening) + 2 * (len(program.ahead) + 1)


def check_rows(rows: list[dict[str, Any]], rounds: int) -> None:
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert [(row["outcome"], row["reports"], row["rejected"]) for row in rows] == [("closed", 2, 0)] * rounds
    assert all(math.isfinite(row[key]) for row in rows for key in ("loss", "accuracy", "train_loss"))


@on_both_engines
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_over_mqtt_and_moves_what_the_server_keeps(name: str, engine: str, tmp_path: Path) -> None:
    program = program_of(name)
    rounds = rounds_for(program)

    rows = run_to_the_end(
        tmp_path / "run",
        ["--program", name, "--engine", engine, "--rounds", str(rounds), "--seed", "7"],
        config(name),
    )

    check_rows(rows, rounds)
    kept = load_file(tmp_path / "run" / "checkpoints" / f"round-{rounds:04}.safetensors")
    model = load_file(tmp_path / "run" / "model.safetensors")
    for memory, begins in (program.memory if program else {}).items():
        tensors = {key: array for key, array in kept.items() if key.startswith(f"{memory}/")}
        assert len(tensors) == len(model), f"one tensor of {memory} for each parameter"
        moved = any(not np.array_equal(array, np.full_like(array, begins)) for array in tensors.values())
        assert moved == ((name, memory) not in PASSING), memory
        assert all(np.isfinite(array).all() for array in tensors.values())


@on_both_engines
@pytest.mark.parametrize("name", KEEPING)
def test_a_device_that_is_killed_goes_on_with_what_it_kept(name: str, engine: str, tmp_path: Path) -> None:
    arguments = ["--program", name, "--engine", engine, "--rounds", "5", "--seed", "7"]
    calm = run_to_the_end(tmp_path / "calm", arguments, config(name))
    shutil.copytree(tmp_path / "calm" / "bundles", tmp_path / "killed" / "bundles")
    run = Run.start(tmp_path / "killed", arguments, config(name))
    run.wait_until(lambda: len(run.rounds) >= 2, "second round")
    run.kill("all-0")

    rows = run.finish()

    check_rows(rows, 5)
    assert rows[-1]["weights_sha256"] == calm[-1]["weights_sha256"]
    assert rows[-1]["train_loss"] == calm[-1]["train_loss"], (
        "a model that nobody sends is seen in its loss alone"
    )
