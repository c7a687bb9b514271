"""Devices of different engines train one model: real broker, real processes, ONNX and ExecuTorch side by side."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.broker import free_port
from tests.conftest import BrokerProcess
from tests.e2e.inside import Trained, train
from tests.e2e.runs import EDGEFL, PATIENCE_S, TINY, run_to_the_end
from tests.support.commands import run_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUNDS = 3
TIERS = """
[tiers.strong]
count = 1
[tiers.moderate]
cut = 1
chunks = 1
ENGINE
count = 1
[tiers.weak]
ENGINE
count = 1
"""
CLOSE = 1e-2
"""Of a tensor's largest entry: what float32 sums in another order may grow to in 9 steps; other data give 0.1 and more."""


def strays(one: Path, other: Path) -> float:
    """Largest difference of two models' tensors, relative to the largest entry of each."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(
        float(np.abs(first[name] - second[name]).max() / max(np.abs(first[name]).max(), 1e-6))
        for name in first
    )


def test_both_engines_train_the_same_model(tmp_path: Path, mosquitto: BrokerProcess, federation: str) -> None:
    config = TINY + TIERS

    def trained(name: str, engine: str, steps: int = 3) -> Trained:
        text = config.replace("ENGINE", engine).replace("steps = 3", f"steps = {steps}")
        return train(tmp_path / name, text, mosquitto.address, f"{federation}-{name}", ROUNDS)

    mixed, alone = trained("mixed", 'engine = "executorch"'), trained("onnx", "")
    other = trained("other", "", steps=4)

    assert mixed.outcomes == [("closed", 3, 0)] * ROUNDS
    assert strays(mixed.folder, alone.folder) <= CLOSE < strays(mixed.folder, other.folder)
    assert mixed.rounds[-1].train_loss == pytest.approx(alone.rounds[-1].train_loss, rel=CLOSE)
    digests = {each.rounds[-1].weights_sha256 for each in (mixed, alone, other)}
    assert len(digests) == 3


def test_all_devices_on_the_engine_that_the_command_names(tmp_path: Path) -> None:
    tiers = "[tiers.all]\ncount = 2\n"
    rounds = run_to_the_end(tmp_path / "run", ["--rounds", "1", "--engine", "executorch"], TINY + tiers)

    assert [(row["reports"], row["rejected"]) for row in rounds] == [(2, 0)]
    assert [path.name for path in (tmp_path / "run" / "bundles").glob("*.efl")] == ["all.executorch.efl"]


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


def test_a_device_without_a_bundle_for_its_engine_declines(tmp_path: Path, started: ExitStack) -> None:
    data = digits()
    write_client(tmp_path / "data.npz", data.train_x[:60], data.train_y[:60])
    (tmp_path / "federation.toml").write_text(
        TINY.replace('name = "e2e"', 'name = "engines"\nrounds = 2')
        + "round_deadline_s = 3600\n[export]\nformats = ['onnx']\n[round]\nmin_devices = 2\n[tiers.all]\n"
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
    # PATIENCE_S is well below the deadline of a round that waits.
    served = run_command(*EDGEFL, *command, "--out", tmp_path / "out", timeout=PATIENCE_S)
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
    assert "add the format to `formats` in [export]" in declined[0]["text"]
    assert "accepted" in [each["event"] for each in said["onnx"]]
    assert {"accepted", "failed"}.isdisjoint(each["event"] for each in said["executorch"])
