"""Worker that trains with onnxsim's training loop: its own gradients of an ONNX graph, run by onnxruntime.

``PYTHON -m benchmarks.train_step.onnxsim_training FOLDER THREADS``, where PYTHON belongs to an environment with
onnxsim and onnxruntime. :func:`prepare` runs in ours and writes ``loss.onnx``, the model's plain export with its loss: what
onnxsim has no gradient for is not taken out of its way. Its SGD has momentum and no decay, which flatters it a little.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.repetition import serve

if TYPE_CHECKING:
    from edgefl.submodels.output_side.submodel import OutputSide


def prepare(folder: Path, submodel: OutputSide, batch: int) -> None:
    """Write the graph of the mean loss in training mode, parameters as initializers, and the parameters' names."""
    from benchmarks.torch_layers import to_torch_layers
    from benchmarks.train_step.et_training import WithLoss
    from benchmarks.train_step.ort_training import write_onnx
    from edgefl.models.losses.as_torch import loss_as_torch

    module = WithLoss(to_torch_layers(submodel.suffix), loss_as_torch(submodel.spec.loss))
    inputs = {"x": submodel.boundary.rows(batch).zeros(), "y": submodel.spec.label.rows(batch).zeros()}
    write_onnx(folder / "loss.onnx", module, inputs, "loss")
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    (folder / "trained.json").write_text(json.dumps(names))


def load(folder: Path) -> Callable[[], float]:
    """Return a step that trains on the next batch; the first one compiles."""
    import numpy as np
    import onnx
    from onnxsim import compile_training_loop

    lr = json.loads((folder / "job.json").read_text())["sgd"]["lr"]
    names = json.loads((folder / "trained.json").read_text())
    loop = compile_training_loop(onnx.load(folder / "loss.onnx"), "loss", names, optimizer="sgd_momentum")
    files = [np.load(path) for path in sorted(folder.glob("batch*.npz"))]
    data = cycle([{"x": file["batch.0.x"], "y": file["batch.0.y"]} for file in files])
    return lambda: float(loop(next(data), lr=lr))


if __name__ == "__main__":
    if hasattr(
        os, "sched_setaffinity"
    ):  # it has no setting for onnxruntime's threads, which are as many as processors
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    import onnxruntime  # noqa: F401 - idle is measured with the libraries imported
    import onnxsim  # noqa: F401

    serve(lambda: load(Path(sys.argv[1])))
