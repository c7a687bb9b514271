"""A program that a device has never heard of: a user's own file, by `edgefl run` and by devices that were started alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.config import load
from edgefl.lab.lab import CONFIG_NAME
from tests.conftest import BrokerProcess
from tests.e2e.runs import EDGEFL, PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS, DEVICES = 3, ("strong-0", "strong-1")
CONFIG = """
[federation]
name = "{federation}"
rounds = 3
[model]
name = "mlp"
options = {{ hidden = [8] }}
[program]
{program}
batch = 8
steps = 3
[data]
name = "digits"
train_samples = 96
test_samples = 100
[tiers.strong]
cut = 0
count = 2
"""
FEDDYN = 'name = "feddyn.py:feddyn"\noptions = { alpha = 0.05 }'
Row = dict[str, Any]


@dataclass(frozen=True)
class FinishedRun:
    """A finished `edgefl run`."""

    folder: Path
    rounds: list[Row]

    def weights(self) -> dict[str, Any]:
        return load_file(self.folder / "model.safetensors")


def run(folder: Path, federation: str) -> FinishedRun:
    """As the documentation says: the file by a path from the working directory, which only ``edgefl run`` has."""
    shutil.copy(REPOSITORY / "docs" / "examples" / "feddyn.py", folder)
    config = folder / "federation.toml"
    config.write_text(CONFIG.format(federation=federation, program=FEDDYN))
    out = folder / "run"
    ran = subprocess.run(
        [*EDGEFL, "run", str(config), "--out", str(out), "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return FinishedRun(out, [json.loads(line) for line in ran.stdout.splitlines()])


def served_by(
    finished: FinishedRun, broker: BrokerProcess, out: Path
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str]]]:
    """The same federation with devices that were started alone: the server, and (output, errors) of each device."""
    shutil.copytree(finished.folder / "bundles", out / "bundles")
    config = finished.folder / CONFIG_NAME
    name, address = load(config).federation.name, f"127.0.0.1:{broker.port}"
    with ExitStack() as stack:
        agents = []
        for device in DEVICES:
            arguments = ["device", "--id", device, "--federation", name, "--broker", address, "--until-done"]
            arguments += ["--data", str(finished.folder / "devices" / device / "data.npz"), "--json"]
            agents.append(
                subprocess.Popen(
                    [*EDGEFL, *arguments, "--store", str(out / device)],
                    cwd=out,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(agents[-1].kill)
        server = [
            *EDGEFL,
            "server",
            "--config",
            str(config),
            "--broker",
            address,
            "--out",
            str(out),
            "--json",
        ]
        served = subprocess.run(
            server,
            cwd=out,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert served.returncode == 0, served.stderr
        said = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
    return served, said


def closed(served: subprocess.CompletedProcess[str]) -> list[Row]:
    rows = [json.loads(line) for line in served.stdout.splitlines()]
    return [row for row in rows if row["event"] == "roundclosed"]


def test_devices_that_never_saw_a_programs_file_train_it_to_the_same_weights(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    finished = run(tmp_path, "users-own")
    served, said = served_by(finished, mosquitto, tmp_path / "alone")

    assert not [errors for _, errors in said if "Traceback" in errors]
    rows = closed(served)
    assert [row["reports"] for row in rows] == [len(DEVICES)] * ROUNDS
    assert rows[-1]["weights_sha256"] == finished.rounds[-1]["weights_sha256"]
    arrays, wanted = load_file(tmp_path / "alone" / "model.safetensors"), finished.weights()
    assert arrays.keys() == wanted.keys()
    assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
