"""A round within the memory that its bundle plans, under a limit of the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.api.training import Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone"),
]

_ROUND = """
import resource, sys
from pathlib import Path
import numpy as np
from edgefl.cli.device import process
process.load()
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.host import return_memory_early, trim_memory
from edgefl_device.profile.measure.inputs import RandomInputs
from edgefl_device.round.offline import train_round
from edgefl.system.memory import status_bytes
from edgefl.wire.bundle.archive import read_bundle

return_memory_early()
bundle, share = read_bundle(Path(sys.argv[1])), float(sys.argv[2])
engine, inputs = open_engine(bundle.manifest.format), RandomInputs(bundle.manifest)
weights = {name: array for part in inputs.weights(bundle.manifest).values() for name, array in part.items()}
rows = inputs.samples(bundle.manifest.batch)
data = LocalData(rows.x, rows.y, "random")
trim_memory()
most = status_bytes("VmData") + int(share * bundle.manifest.planned_bytes)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
print(train_round(bundle, weights, data, engine).samples)
"""


def run_within(folder: Path, target: Target, share: float) -> subprocess.CompletedProcess[str]:
    """Run a round in a process that may take ``share`` of the plan above its idle self."""
    if target == "executorch":
        pytest.importorskip("executorch")
    made = edgefl.compile(
        "mlp",
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=2048, steps=2)),
        options=edgefl.CompileOptions(target=target),
    )
    command = [sys.executable, "-c", _ROUND, str(made.save(folder / "mlp.efl")), str(share)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_a_round_keeps_within_its_plan_and_a_tenth(tmp_path: Path, target: Target) -> None:
    found = run_within(tmp_path, target, 1.1)

    assert (found.stdout.strip(), found.returncode) == ("2048", 0), found.stderr


def test_a_round_fails_with_half_of_its_plan(tmp_path: Path) -> None:
    assert run_within(tmp_path, "onnx", 0.5).returncode != 0
