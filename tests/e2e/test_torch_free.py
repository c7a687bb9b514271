"""`pip install edgefl` gives a device without torch that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path

import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.ports import free_port
from tests.e2e.runs import EDGEFL

# What pip installs; the default ring links what is declared (test_by_hand).
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """
[federation]
name = "bare"
rounds = 2
[model]
name = "mlp"
options = { hidden = [16] }
[program]
batch = 8
steps = 5
[data]
name = "digits"
[export]
formats = ["onnx", "executorch"]
[round]
min_devices = 2
[tiers.strong]
cut = 0
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with nothing but the device's distribution."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", str(REPOSITORY)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _lend_executorch(folder)
    return folder / "bin"


def _lend_executorch(environment: Path) -> None:
    """The package by itself, as `pip install --no-deps executorch` leaves it."""
    target = next(environment.glob("lib/python*/site-packages"))
    for file in Path(str(distribution("executorch").locate_file(""))).glob("executorch*"):
        (target / file.name).symlink_to(file)


def test_the_device_installs_without_torch_onnx_or_the_servers_packages(bare: Path) -> None:
    listed = subprocess.run(
        [str(bare / "python"), "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    installed = {package["name"].lower() for package in json.loads(listed.stdout)}

    assert {"edgefl", "onnxruntime", "paho-mqtt", "safetensors"} <= installed
    assert not installed & {"torch", "onnx", "onnxscript", "sqlalchemy", "amqtt", "scikit-learn"}


def test_devices_without_torch_train(bare: Path, tmp_path: Path) -> None:
    data = digits()
    write_client(tmp_path / "data.npz", data.train_x[:100], data.train_y[:100])
    (tmp_path / "federation.toml").write_text(CONFIG)
    address = f"127.0.0.1:{free_port()}"
    device = [
        str(bare / "edgefl"),
        "device",
        "--federation",
        "bare",
        "--broker",
        address,
        "--until-done",
        "--json",
    ]
    server = [*EDGEFL, "server", "--config", str(tmp_path / "federation.toml"), "--broker", address, "--json"]

    with ExitStack() as stack:
        broker = subprocess.Popen([*EDGEFL, "broker", "--port", address.rpartition(":")[2]])
        stack.callback(broker.kill)
        agents = []
        for engine in ("onnx", "executorch"):
            own = ["--id", engine, "--engine", engine, "--store", str(tmp_path / engine)]
            command = [*device, *own, "--data", str(tmp_path / "data.npz")]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            stack.callback(agents[-1].kill)
        command = [*server, "--out", str(tmp_path / "out")]
        served = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert served.returncode == 0, served.stderr
        said = [agent.communicate(timeout=300)[0].decode() for agent in agents]

    for agent, lines in zip(agents, said, strict=True):
        assert agent.returncode == 0, lines
        assert [json.loads(line)["event"] for line in lines.splitlines()].count("accepted") == 2
    closed = [json.loads(line) for line in served.stdout.splitlines() if '"roundclosed"' in line]
    assert [row["reports"] for row in closed] == [2, 2]
