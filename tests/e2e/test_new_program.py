"""A program that a device has never heard of: a user's own file, on devices that an older wheel installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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
OLDER = "7314144"
"""The last commit without programs of several exchanges, server optimizers or draws."""
ROUNDS, DEVICES = 3, ("strong-0", "strong-1")
AS_DEVICE = """
import sys, device_runtime
print(device_runtime.__file__, file=sys.stderr, flush=True)
from edgefl.cli import main
main()
"""
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


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of the older release is installed, alone; its dependencies are ours."""
    folder = tmp_path_factory.mktemp("older")
    known = subprocess.run(
        ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{OLDER}^{{commit}}"],
        capture_output=True,
        check=False,
    )
    if known.returncode:
        pytest.skip(f"this clone has no commit {OLDER}: fetch the whole history (git fetch --unshallow)")
    source, wheels, site = folder / "source", folder / "wheels", folder / "site"
    source.mkdir()
    archive = folder / "source.tar"
    archived = ["git", "-C", str(REPOSITORY), "archive", "--output", str(archive), OLDER]
    subprocess.run(archived, check=True)
    shutil.unpack_archive(archive, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    _run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(source)])
    [wheel] = wheels.glob("edgefl-*.whl")
    _run([*pip, "install", *offline, "--target", str(site), str(wheel)])
    return site


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Today:
    """A finished `edgefl run` of today's devices."""

    folder: Path
    rounds: list[Row]

    def weights(self) -> dict[str, Any]:
        return load_file(self.folder / "model.safetensors")


def on_path(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}


def run_today(folder: Path, federation: str, program: str) -> Today:
    """As the documentation says: the file by a path from the working directory, which only ``edgefl run`` has."""
    shutil.copy(REPOSITORY / "docs" / "examples" / "feddyn.py", folder)
    config = folder / "federation.toml"
    config.write_text(CONFIG.format(federation=federation, program=program))
    out = folder / "today"
    ran = subprocess.run(
        [*EDGEFL, "run", str(config), "--out", str(out), "--json"],
        cwd=folder,
        env=on_path(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return Today(out, [json.loads(line) for line in ran.stdout.splitlines()])


def served_by(
    today: Today, site: Path, broker: BrokerProcess, out: Path
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str]]]:
    """The same federation with devices of the older wheel: the server, and (output, errors) of each device."""
    shutil.copytree(today.folder / "bundles", out / "bundles")
    config = today.folder / CONFIG_NAME
    name, address = load(config).federation.name, f"127.0.0.1:{broker.port}"
    with ExitStack() as stack:
        agents = []
        for device in DEVICES:
            arguments = ["device", "--id", device, "--federation", name, "--broker", address, "--until-done"]
            arguments += ["--data", str(today.folder / "devices" / device / "data.npz"), "--json"]
            agents.append(
                subprocess.Popen(
                    [sys.executable, "-c", AS_DEVICE, *arguments, "--store", str(out / device)],
                    cwd=out,
                    env=on_path(site),
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
            env=on_path(),
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


@pytest.mark.parametrize("program", ["feddyn", "scaffold"])
def test_devices_of_an_older_wheel_train_a_new_program_to_the_same_weights(
    program: str, older: Path, mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    today = run_today(tmp_path, f"old-{program}", FEDDYN if program == "feddyn" else f'name = "{program}"')
    served, said = served_by(today, older, mosquitto, tmp_path / "older")

    for _, errors in said:
        assert errors.splitlines()[0] == str(older / "device_runtime" / "__init__.py")
    rows = closed(served)
    assert [row["reports"] for row in rows] == [len(DEVICES)] * ROUNDS
    assert rows[-1]["weights_sha256"] == today.rounds[-1]["weights_sha256"]
    found, wanted = load_file(tmp_path / "older" / "model.safetensors"), today.weights()
    assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_devices_of_an_older_wheel_complete_a_program_that_draws_its_batches(
    older: Path, mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    """They walk through their data in place of drawing, so that the weights are others."""
    today = run_today(tmp_path, "old-draws", 'name = "per_fedavg"\noptions = { mode = "fo" }')
    served, _ = served_by(today, older, mosquitto, tmp_path / "older")

    rows = closed(served)
    assert [row["reports"] for row in rows] == [len(DEVICES)] * ROUNDS
    assert all(np.isfinite(row["loss"]) for row in rows)
