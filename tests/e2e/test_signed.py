"""A fleet with a signing server: devices that know its key train, others refuse the bundle."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.ports import free_port
from edgefl.wire.bundle.formats import FORMATS
from edgefl.wire.bundle.signatures import Signer
from tests.e2e.runs import EDGEFL, PATIENCE_S
from tests.e2e.test_torch_free import CONFIG

pytestmark = pytest.mark.e2e


def test_a_device_loads_only_what_its_server_signed(tmp_path: Path) -> None:
    data = digits()
    write_client(tmp_path / "data.npz", data.train_x[:100], data.train_y[:100])
    config = (
        CONFIG.replace("rounds = 2", "rounds = 1")
        + "[limits]\nround_deadline_s = 20\n[round]\nmin_devices = 4\n"
    )
    (tmp_path / "federation.toml").write_text(config)
    ours, strangers = Signer(tmp_path / "server.key"), Signer(tmp_path / "other.key")
    address = f"127.0.0.1:{free_port()}"

    def device(name: str, engine: str, key: str) -> subprocess.Popen[bytes]:
        command = [*EDGEFL, "device", "--id", f"{name}-{engine}", "--federation", "bare", "--broker", address]
        command += ["--engine", engine, "--server-key", key, "--until-done", "--json"]
        command += ["--data", str(tmp_path / "data.npz"), "--store", str(tmp_path / f"{name}-{engine}")]
        return stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )

    with ExitStack() as stack:
        broker = stack.enter_context(
            subprocess.Popen([*EDGEFL, "broker", "--port", address.rpartition(":")[2]])
        )
        stack.callback(broker.kill)
        agents = {
            (name, engine): device(name, engine, key)
            for name, key in (("knows", ours.public_key), ("doubts", strangers.public_key))
            for engine in FORMATS
        }
        for agent in agents.values():
            stack.callback(agent.kill)
        command = [*EDGEFL, "server", "--config", str(tmp_path / "federation.toml"), "--broker", address]
        command += ["--json", "--out", str(tmp_path / "out"), "--sign-key", str(tmp_path / "server.key")]
        served = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        said = {
            who: [json.loads(line)["event"] for line in agent.communicate(timeout=300)[0].splitlines()]
            for who, agent in agents.items()
        }

    assert served.returncode == 0, served.stderr
    closed = next(json.loads(line) for line in served.stdout.splitlines() if '"roundclosed"' in line)
    assert closed["reports"] == len(FORMATS)
    for engine in FORMATS:
        assert "accepted" in said["knows", engine]
        assert "failed" in said["doubts", engine]
        assert "accepted" not in said["doubts", engine]
