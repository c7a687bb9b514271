"""No engine tells anybody but the server about this device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAID = ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI", "XDG_CACHE_HOME")
SHOWS = """
import {module}
from pathlib import Path
assert "onnxruntime" in __import__("sys").modules
print(len([*Path("/proc/self/task").iterdir()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("module", ["device_runtime.engine.onnx", "exporters.deploy"])
def test_onnxruntime_is_told_to_report_to_nobody_before_it_is_imported(module: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SAID}
    told = subprocess.run(
        [sys.executable, "-c", SHOWS.format(module=module)],
        env={**environment, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(told) == 1, "a thread waits to tell"
    assert not [*tmp_path.rglob("*")], "what is to be told waits in a file"
