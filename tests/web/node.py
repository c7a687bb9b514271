"""Graphs in onnxruntime-web: Node runs the WebAssembly that a browser would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgefl_export.verify.graphs import Run
from tests import needs

HERE = Path(__file__).parent
RUN_S = 120.0

Array = NDArray[Any]


def require_node() -> None:
    """Node with the pinned packages of this folder, or the test is skipped."""
    needs.require("node")
    needs.require_packages(HERE)


@dataclass(frozen=True)
class Ran:
    """What the last step gave, in the order of the graph, and how long loading and each step took."""

    outputs: list[Array]
    load_ms: float
    step_ms: list[float]


def run(model: bytes, arrays: Mapping[str, Array], folder: Path, steps: int = 1) -> Ran:
    """``steps`` runs of ``model`` in a fresh Node; what it rewrites (state) goes round. ``folder`` must exist."""
    wanted = [port.name for port in onnx.load_from_string(model).graph.input]
    (folder / "graph.onnx").write_bytes(model)
    ports = [
        {"name": name, "dtype": str(arrays[name].dtype), "shape": list(arrays[name].shape)} for name in wanted
    ]
    (folder / "inputs.json").write_text(json.dumps(ports))
    (folder / "inputs.bin").write_bytes(b"".join(arrays[name].tobytes() for name in wanted))
    ran = subprocess.run(
        ["node", str(HERE / "run.mjs"), str(folder), str(steps)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads((folder / "outputs.json").read_text())
    return Ran(
        _split((folder / "outputs.bin").read_bytes(), told["outputs"]), told["load_ms"], told["step_ms"]
    )


def runtime(model: bytes, folder: Path) -> Run:
    """``model`` as :func:`edgefl_export.verify.graphs.compare` wants it."""

    def call(arrays: Mapping[str, Array]) -> Sequence[Array]:
        return run(model, arrays, folder).outputs

    return call


def _split(data: bytes, ports: Sequence[Mapping[str, Any]]) -> list[Array]:
    found, start = [], 0
    for port in ports:
        dtype, count = np.dtype(port["dtype"]), int(np.prod(port["shape"], dtype=np.int64))
        found.append(np.frombuffer(data, dtype, count, start).reshape(port["shape"]))
        start += count * dtype.itemsize
    assert start == len(data), "the outputs' sizes and their bytes disagree"
    return found
