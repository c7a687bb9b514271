"""A server that waits: what it has loaded, and that nothing of it is left where it is killed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.conftest import Mosquitto
from tests.e2e.runs import EDGEFL, TINY
from tests.server.torch_process.processes import torch_process_of, wait_until_gone


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_waiting_server_has_loaded_no_torch(tmp_path: Path, mosquitto: Mosquitto) -> None:
    config = tmp_path / "waits.toml"
    config.write_text(TINY + "[tiers.strong]\n")
    broker = f"127.0.0.1:{mosquitto.address.port}"
    command = [*EDGEFL, "server", "--config", str(config), "--out", str(tmp_path / "out"), "--broker", broker]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        said = (json.loads(line)["event"] for line in server.stdout)
        assert "waiting" in said
        loaded, torch_process = libraries(server.pid), torch_process_of(server.pid)
        assert "libtorch" not in loaded and "llvmlite" not in loaded and "_multiarray_umath" in loaded
        assert "libtorch" in libraries(torch_process)
        server.kill()
    wait_until_gone(torch_process)
