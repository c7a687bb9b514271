"""Latency and peak memory of a deployed file in its stock runtime, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.system.python import child_path, module_command
from edgefl.wire.errors import ExportError

if TYPE_CHECKING:
    from exporters.deploy.export import Artifact
    from exporters.deploy.target import DeployTarget

_FREE = 224
"""Size of an axis that may have any, such as the sides of an image."""
_SECONDS, _MOST_CALLS, _WARM = 0.2, 100, 2
_TIMEOUT_S = 300


def measured(artifact: Artifact, target: DeployTarget, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``latency_ms``, the median of one call, and ``peak_bytes``, the rise of the process's peak from before the file
    is loaded.

    Args:
        artifact: the file.
        target: its format.
        inputs: the facts of its inputs.

    Raises:
        ExportError: if the process ends without an answer.
    """
    ports = [
        {
            "name": each["name"],
            "dtype": each["dtype"],
            "shape": [_FREE if size is None else size for size in each["shape"]],
        }
        for each in inputs
    ]
    for port in ports if target.dynamic_batch else ():
        port["shape"][0] = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        file.write_bytes(artifact.model)
        if artifact.loader:
            file.with_suffix(".safetensors").write_bytes(artifact.model)
            file.with_suffix(".py").write_text(artifact.loader)
        try:
            ran = subprocess.run(
                module_command(__name__, target.format, str(file), json.dumps(ports)),
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": child_path()},
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"expected the file to be measured within {_TIMEOUT_S} s; it still runs"
            ) from error
    if ran.returncode:
        line = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise ExportError(f"the file cannot be measured in a process of its own: {line}")
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes, 0 if the system has none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def _imported(format: str) -> Callable[[Path], Callable[[Mapping[str, Any]], object]]:
    """Import the runtime of a format, and return what loads a file with it."""
    if format == "onnx":
        import onnxruntime

        def load_onnx(path: Path) -> Callable[[Mapping[str, Any]], object]:
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            return lambda rows: session.run(None, dict(rows))

        return load_onnx
    import torch

    if format == "executorch":
        from executorch.extension.pybindings import portable_lib

        def load_program(path: Path) -> Callable[[Mapping[str, Any]], object]:
            module = portable_lib._load_for_executorch(str(path))
            return lambda rows: module.forward([torch.from_numpy(each) for each in rows.values()])

        return load_program

    def load_torch(path: Path) -> Callable[[Mapping[str, Any]], object]:
        import runpy

        model = runpy.run_path(str(path.with_suffix(".py")))["load"]()
        return lambda rows: model(*(torch.from_numpy(each) for each in rows.values()))

    return load_torch


def main(format: str, file: str, ports: str) -> None:
    """Measure a file and print the result as JSON.

    Args:
        format: format of the file.
        file: its path.
        ports: name, dtype and shape of each input, in JSON.
    """
    load = _imported(format)
    rows = {port["name"]: np.zeros(port["shape"], port["dtype"]) for port in json.loads(ports)}
    before = _status("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    model = load(Path(file))
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _WARM + 1 or (time.perf_counter() < end and len(times) < _MOST_CALLS):
        start = time.perf_counter()
        model(rows)
        times.append(time.perf_counter() - start)
    found = {
        "latency_ms": float(np.median(times[_WARM:])) * 1000,
        "peak_bytes": max(0, _status("VmHWM") - before),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
