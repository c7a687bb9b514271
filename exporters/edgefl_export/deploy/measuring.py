"""Latency and peak memory of a deployed file in its stock runtime, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from edgefl.errors import ExportError
from edgefl.system.memory import status_bytes
from edgefl.system.processes import child_path, module_command

if TYPE_CHECKING:
    from edgefl_export.deploy.target import DeployTarget

_FREE = 224
"""Size of an axis that may have any, such as the sides of an image."""
_SECONDS, _MOST_CALLS, _WARM = 0.2, 100, 2
_TIMEOUT_S = 300


class FileMeasurement:
    """Child process that measures one deployed file; leaving the ``with`` block kills it.

    It starts before the file exists, so that it loads the runtime while the caller writes the file.
    """

    def __init__(self, target: DeployTarget) -> None:
        """Start the process.

        Args:
            target: format and options of the file.
        """
        self._any_batch = target.dynamic_batch
        self._process = subprocess.Popen(
            module_command(__name__, target.format),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": child_path()},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()

    def of(self, file: Path, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Measure ``file`` on zeros and return ``latency_ms`` and ``peak_bytes``. May be called once.

        ``latency_ms`` is the median of the calls. ``peak_bytes`` is the peak memory of the process minus its memory before
        the file is loaded.

        Args:
            file: path of the file; the loader of a .safetensors file lies beside it.
            inputs: ``name``, ``shape`` and ``dtype`` of each input; an axis of None has any size.

        Raises:
            ExportError: if the process fails or does not finish within 300 seconds.
        """
        ports = [
            {**each, "shape": [_FREE if size is None else size for size in each["shape"]]} for each in inputs
        ]
        for port in ports if self._any_batch else ():
            port["shape"][0] = 1
        try:
            found, errors = self._process.communicate(json.dumps([str(file), ports]), _TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"expected the file to be measured within {_TIMEOUT_S} s; it still runs"
            ) from error
        if self._process.returncode:
            line = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            raise ExportError(f"the file cannot be measured in a process of its own: {line}")
        return dict(json.loads(found.splitlines()[-1]))


def _import_loader(format: str) -> Callable[[Path], Callable[[Mapping[str, Any]], object]]:
    """Import the runtime of a format and return a function that loads a file and returns a function that runs it."""
    if format == "onnx":
        import onnxruntime

        def load_onnx(path: Path) -> Callable[[Mapping[str, Any]], object]:
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            return lambda rows: session.run(None, dict(rows))

        return load_onnx
    import torch

    if format == "executorch":
        from edgefl_export.executorch.silent_import import portable_lib

        runtime = portable_lib()

        def load_program(path: Path) -> Callable[[Mapping[str, Any]], object]:
            module = runtime._load_for_executorch(str(path))
            return lambda rows: module.forward([torch.from_numpy(each) for each in rows.values()])

        return load_program

    def load_torch(path: Path) -> Callable[[Mapping[str, Any]], object]:
        import runpy

        model = runpy.run_path(str(path.with_suffix(".py")))["load"]()
        return lambda rows: model(*(torch.from_numpy(each) for each in rows.values()))

    return load_torch


def main(format: str) -> None:
    """Read ``[path, inputs]`` as JSON from the standard input, measure that file, and print the result as JSON.

    Args:
        format: format of the file.
    """
    load = _import_loader(format)
    file, ports = json.load(sys.stdin)
    rows = {port["name"]: np.zeros(port["shape"], port["dtype"]) for port in ports}
    before = status_bytes("VmRSS")
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
        "peak_bytes": max(0, status_bytes("VmHWM") - before),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
