"""Worker that trains with onnxruntime-training, the retired training build of ONNX Runtime.

``PYTHON -m benchmarks.train_step.ort_training FOLDER THREADS``, where PYTHON belongs to an environment of its own: the
package cannot be installed beside ``onnxruntime``. :func:`prepare` runs in ours and writes ``forward.onnx``, a plain
inference export of the module; the artifacts for training are made over there, from that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from edgefl.submodels.output_side.submodel import OutputSide

OPSET = 17
IR_VERSION = 9


def prepare(folder: Path, submodel: OutputSide, batch: int) -> None:
    """Write the forward graph in training mode, parameters as initializers, and the parameters' names."""
    from benchmarks.torch_layers import to_torch_layers
    from benchmarks.train_step.eager import has_plain_labels

    if not has_plain_labels(submodel):
        raise NotImplementedError("only plain cross entropy with one label per sample is compared")
    module = to_torch_layers(submodel.suffix)
    write_onnx(folder / "forward.onnx", module, {"x": submodel.boundary.rows(batch).zeros()}, "out")
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    (folder / "parameters.json").write_text(json.dumps(names))


def write_onnx(path: Path, module: nn.Module, inputs: Mapping[str, Tensor], output: str) -> None:
    """Export ``module`` in training mode by torch's older exporter, for named ``inputs``."""
    import onnx
    import torch

    with warnings.catch_warnings(), _without_output():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[output],
            opset_version=OPSET,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            export_params=True,
            dynamo=False,
        )
    model = onnx.load(path)
    model.ir_version = min(model.ir_version, IR_VERSION)
    onnx.save(model, path)


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Silence file descriptor 1: torch prints graphs that it cannot export there, among our rows."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def load(folder: Path, threads: int, made: Path) -> Callable[[], object]:
    """Load the artifacts; return a step that trains on the next batch.

    The package has AdamW and plain SGD: SGD without momentum flatters it a little.
    """
    import numpy as np
    from onnxruntime import SessionOptions
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    state = CheckpointState.load_checkpoint(str(made / "checkpoint"))
    # No evaluation graph: batch norm in training mode has outputs that its inference form may not have.
    module = Module(str(made / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(made / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(json.loads((folder / "job.json").read_text())["sgd"]["lr"])
    files = [np.load(path) for path in sorted(folder.glob("batch*.npz"))]
    data = cycle([(file["batch.0.x"], file["batch.0.y"]) for file in files])
    module.train()

    def step() -> float:
        loss = module(*next(data))
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def make_artifacts(folder: Path, made: Path) -> None:
    """Write the training graphs of ``forward.onnx`` to ``made``."""
    import onnx
    from onnxruntime.training import artifacts

    artifacts.generate_artifacts(
        onnx.load(str(folder / "forward.onnx")),
        requires_grad=json.loads((folder / "parameters.json").read_text()),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=str(made),
    )


def main(arguments: list[str]) -> None:
    """Make the artifacts in a process of their own, because their memory is the server's; then serve steps."""
    import subprocess

    from benchmarks.repetition import serve

    folder, rest = Path(arguments[0]), arguments[1:]
    if len(rest) == 2:
        make_artifacts(folder, Path(rest[1]))
        return
    with tempfile.TemporaryDirectory(prefix="edgefl-artifacts-") as name:
        command: list[Any] = [
            sys.executable,
            "-m",
            "benchmarks.train_step.ort_training",
            folder,
            rest[0],
            name,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        import numpy  # noqa: F401 - idle is measured with the libraries imported
        import onnxruntime.training.api  # noqa: F401

        serve(lambda: load(folder, int(rest[0]), Path(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
