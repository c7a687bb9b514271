"""No engine tells anybody but the server about this device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.silence import frank_environment

SHOWS = """
import {module}, sys
from pathlib import Path
assert "onnxruntime" in sys.modules
print(len([*Path("/proc/self/task").iterdir()]))
"""


def threads_of(module: str, home: Path, **more: str) -> int:
    told = subprocess.run(
        [sys.executable, "-c", SHOWS.format(module=module)],
        env=frank_environment(home, **more),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout)


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("module", ["edgefl_device.engine.onnx", "edgefl_export.deploy.export"])
def test_onnxruntime_is_told_to_report_to_nobody_before_it_is_imported(module: str, tmp_path: Path) -> None:
    assert threads_of(module, tmp_path, ORT_DISABLE_TELEMETRY="") == 1, "a thread waits to tell"
    assert not [*tmp_path.rglob("*")], "what is to be told waits in a file"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_would_report_and_whoever_wants_that_may_say_so(tmp_path: Path) -> None:
    assert threads_of("edgefl_device.engine.onnx", tmp_path, ORT_DISABLE_TELEMETRY="0") > 1
    assert [*tmp_path.rglob("onnxruntime.db")]
