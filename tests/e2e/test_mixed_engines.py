"""Devices of different engines train one model: real broker, real processes, ONNX and ExecuTorch side by side."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.ports import free_port
from edgefl.wire.bundle import archive as bundles
from tests.e2e.runs import EDGEFL, SMALL, Run, run_to_the_end

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUNDS = 3
ARGUMENTS = ["--rounds", str(ROUNDS), "--seed", "7"]
MIXED = SMALL.replace("[tiers.moderate]\n", '[tiers.moderate]\nengine = "executorch"\n').replace(
    "[tiers.weak]\n", '[tiers.weak]\nengine = "executorch"\n'
)
CLOSE = 1e-2
"""Of a tensor's largest entry: what float32 sums in another order may grow to in 18 steps; other data give 0.2 and more."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One device on onnxruntime and two on ExecuTorch, undisturbed."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    return folder, run_to_the_end(folder, ARGUMENTS, MIXED)


def strays(one: Path, other: Path) -> float:
    """Largest difference of two models' tensors, relative to the largest entry of each."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(
        float(np.abs(first[name] - second[name]).max() / max(np.abs(first[name]).max(), 1e-6))
        for name in first
    )


def test_a_fleet_of_both_engines_trains_the_model_that_onnx_alone_trains(
    tmp_path: Path, mixed: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, rounds = mixed
    alone = run_to_the_end(tmp_path / "onnx", ARGUMENTS)
    other = run_to_the_end(tmp_path / "other", ["--rounds", str(ROUNDS), "--seed", "8"])

    assert [(row["reports"], row["rejected"]) for row in rounds] == [(3, 0)] * ROUNDS
    assert strays(folder, tmp_path / "onnx") <= CLOSE < strays(folder, tmp_path / "other")
    assert rounds[-1]["train_loss"] == pytest.approx(alone[-1]["train_loss"], rel=CLOSE)
    assert rounds[-1]["weights_sha256"] != alone[-1]["weights_sha256"] != other[-1]["weights_sha256"]


def test_each_tier_was_exported_for_its_own_engine(mixed: tuple[Path, list[dict[str, Any]]]) -> None:
    names = {path.name: bundles.read(path).manifest for path in (mixed[0] / "bundles").glob("*.efl")}

    assert {name: (made.tier, made.format) for name, made in names.items()} == {
        "strong.efl": ("strong", "onnx"),
        "moderate.executorch.efl": ("moderate", "executorch"),
        "weak.executorch.efl": ("weak", "executorch"),
    }


@pytest.mark.parametrize("victim", ["weak-0", "server"])
def test_a_killed_process_of_a_mixed_fleet_changes_no_bit(
    tmp_path: Path, mixed: tuple[Path, list[dict[str, Any]]], victim: str
) -> None:
    folder, rounds = mixed
    shutil.copytree(folder / "bundles", tmp_path / "run" / "bundles")
    run = Run.start(tmp_path / "run", ARGUMENTS, MIXED)
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    run.kill(victim)

    assert run.finish()[-1]["weights_sha256"] == rounds[-1]["weights_sha256"]


def test_all_devices_on_the_engine_that_the_command_names(tmp_path: Path) -> None:
    rounds = run_to_the_end(tmp_path / "run", ["--rounds", "1", "--engine", "executorch"], TINY)

    assert [(row["reports"], row["rejected"]) for row in rounds] == [(2, 0)]
    assert [path.name for path in (tmp_path / "run" / "bundles").glob("*.efl")] == ["all.executorch.efl"]


TINY = """
[federation]
name = "engines"
rounds = 2
[model]
name = "mlp"
options = { hidden = [8] }
[program]
batch = 8
steps = 3
[data]
name = "digits"
train_samples = 90
test_samples = 100
[tiers.all]
devices = ["*"]
count = 2
"""


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Processes that end with the test."""
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *arguments: object) -> subprocess.Popen[bytes]:
    process = stack.enter_context(
        subprocess.Popen([*EDGEFL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    )
    stack.callback(process.kill)
    return process


def test_a_device_whose_engine_has_no_bundle_declines_and_the_round_goes_on(
    tmp_path: Path, started: ExitStack
) -> None:
    data = digits()
    write_client(tmp_path / "data.npz", data.train_x[:60], data.train_y[:60])
    (tmp_path / "federation.toml").write_text(
        TINY.replace("count = 2", "count = 0")
        + "[export]\nformats = ['onnx']\n[round]\nmin_devices = 2\n[limits]\nround_deadline_s = 600\n"
    )
    address = f"127.0.0.1:{free_port()}"
    start(started, "broker", "--port", address.rpartition(":")[2])
    agents = {
        engine: start(
            started,
            *("device", "--id", engine, "--federation", "engines", "--broker", address, "--engine", engine),
            *("--data", tmp_path / "data.npz", "--store", tmp_path / engine, "--until-done", "--json"),
        )
        for engine in ("onnx", "executorch")
    }
    command = ["server", "--config", str(tmp_path / "federation.toml"), "--broker", address, "--json"]
    served = subprocess.run(
        [*EDGEFL, *command, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,  # well below the deadline of a round that waits
        check=False,
    )
    said = {
        name: [json.loads(line) for line in agent.communicate(timeout=300)[0].splitlines()]
        for name, agent in agents.items()
    }

    assert served.returncode == 0, served.stderr
    events = [json.loads(line) for line in served.stdout.splitlines()]
    closed = [(each["outcome"], each["reports"]) for each in events if each["event"] == "roundclosed"]
    declined = [each for each in events if each["event"] == "declined"]
    assert closed == [("closed", 1)] * 2
    assert {(each["device"], each["reason"]) for each in declined} == {("executorch", "no-format")}
    assert 'formats = ["onnx", "executorch"] in [export]' in declined[0]["text"]
    assert "accepted" in [each["event"] for each in said["onnx"]]
    assert {"accepted", "failed"}.isdisjoint(each["event"] for each in said["executorch"])
