"""A model for inference as one file: weights and statistics inside, samples in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edgefl.contract.tensors import Tensors
from edgefl.errors import ExportError
from edgefl.models.copies import copy_module
from edgefl.models.inputs import call_with_inputs
from edgefl.wire.tensors import Array
from edgefl_export.deploy.files import (
    ExecuTorchFile,
    ExecuTorchProgram,
    LoadedTorchFile,
    OnnxFile,
    OnnxSession,
    Rows,
    TorchFile,
)
from edgefl_export.deploy.program import INPUT, MOST_ROWS, OUTPUT, DeployModel, InferenceProgram, program_of
from edgefl_export.deploy.target import DeployTarget
from edgefl_export.verify.graphs import ABSOLUTE, FACTOR, RELATIVE

Run = Callable[[Mapping[str, Array]], Array]
"""Function that runs a file in its stock runtime: arrays by name of the input in, array of the output out."""


@dataclass(frozen=True)
class DeployArtifact:
    """Deployed file and the measured error of its output.

    Attributes:
        model: the bytes of the file.
        batch: number of samples of one call; 0 if any number is accepted.
        inputs: names of the inputs, in order.
        max_rel_error: largest difference from torch on the compared rows, relative to the largest logit.
        rows: number of compared rows.
        loader: Python source of the loader of a .safetensors file; "" for other formats.
    """

    model: bytes = field(repr=False)
    batch: int
    inputs: tuple[str, ...]
    max_rel_error: float
    rows: int
    loader: str = field(default="", repr=False)


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """Model in the format of a target, before its metadata are added.

    Attributes:
        target: format and options.
        program: result of torch.export.
        run: function that runs the file in its stock runtime.
        max_rel_error: largest difference from torch, relative to the largest logit.
        rows: number of rows that were compared.
    """

    target: DeployTarget
    program: InferenceProgram
    run: Run = field(repr=False)
    max_rel_error: float
    rows: int
    _file: OnnxFile | ExecuTorchFile | TorchFile = field(repr=False)

    @property
    def runtime(self) -> Mapping[str, Any]:
        """Facts about the runtime: ``name``, ``least`` (the first release that loads the file), and details by format."""
        return self._file.runtime

    @property
    def float_weights(self) -> Mapping[str, int]:
        """Number of weights that int8 quantization left in float32, by operator; empty for files without int8 weights."""
        if self.target.quantize != "int8" or isinstance(self._file, TorchFile):
            return {}
        return self._file.float_weights

    def forward(self, inputs: Tensors) -> torch.Tensor:
        """Run the file on ``inputs``, named as in the model, in groups of its batch size, and return all outputs."""
        subject = self.program.subject
        rows = {subject.name(name): each.numpy() for name, each in subject.rows(inputs).items()}
        count = len(inputs[INPUT])
        groups = group_rows(count, self.target.batch)
        if self.target.dynamic_batch:
            groups = np.split(np.arange(count), range(MOST_ROWS, count, MOST_ROWS))
        outputs = [self.run({name: each[at] for name, each in rows.items()}) for at in groups]
        return torch.from_numpy(np.concatenate(outputs)[:count])

    def artifact(self, metadata: Mapping[str, Any]) -> DeployArtifact:
        """Return the file with ``metadata`` inside.

        Raises:
            ExportError: if the file does not load, or if the metadata changed its output.
        """
        model = self._file.model(metadata)
        loader = self._file.loader if isinstance(self._file, TorchFile) else ""
        example = dict(zip(self.program.inputs, (each.numpy() for each in self.program.example), strict=True))
        if not np.array_equal(
            _load_file(self.target, model, self.program, loader)(example), self.run(example), True
        ):
            raise ExportError("the file with its metadata computes another output than without them")
        batch = 0 if self.target.dynamic_batch else self.target.batch
        return DeployArtifact(model, batch, self.program.inputs, self.max_rel_error, self.rows, loader)


def deploy(
    subject: DeployModel,
    rows: Tensors,
    target: DeployTarget | None = None,
    *,
    calibration: Tensors | None = None,
    names: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Export a model as a file, load it in its stock runtime, and compare it with torch.

    Args:
        subject: the model in inference mode.
        rows: real data to compare on, by names of the inputs.
        target: format and options; None for an ONNX file with the default options.
        calibration: data that int8 ranges are measured on; not used by other quantizations.
        names: names of tensors in a .safetensors file, by their names in the module.

    Raises:
        ConfigError: if a package is missing.
        ExportError: if the model cannot be exported, or a float32 file differs from torch by more than rounding.
    """
    target = target or DeployTarget()
    program = program_of(subject, target, half=target.quantize == "float16" and target.format == "executorch")
    groups = _groups(program.subject, calibration or {}, target) if calibration else []
    file: OnnxFile | ExecuTorchFile | TorchFile
    if target.format == "onnx":
        file = OnnxFile(program, target, groups)
    elif target.format == "executorch":
        file = ExecuTorchFile(program, target, groups)
    else:
        file = TorchFile(program, target, names or {})
    run = _load_file(target, file.model({}), program, getattr(file, "loader", ""))
    made = ExportedModel(target, program, run, 0.0, len(rows[INPUT]), file)
    error = compare(program.subject, made.forward, rows, batch=target.batch, exact=target.quantize == "none")
    return ExportedModel(target, program, run, error, len(rows[INPUT]), file)


def _load_file(target: DeployTarget, model: bytes, program: InferenceProgram, loader: str) -> Run:
    try:
        if target.format == "onnx":
            return OnnxSession(model)
        if target.format == "executorch":
            return ExecuTorchProgram(model, program.inputs)
        return LoadedTorchFile(model, loader, program.inputs)
    except Exception as error:  # runtimes raise types of their own, without a common one
        raise ExportError(f"the written file does not load in its runtime: {error}") from error


def _groups(subject: DeployModel, rows: Tensors, target: DeployTarget) -> Rows:
    count = len(rows[INPUT])
    given = {
        subject.name(name): each.numpy()
        for name, each in subject.rows(rows).items()
        if name in subject.inputs
    }
    size = 1 if target.dynamic_batch else target.batch
    return [{name: each[at] for name, each in given.items()} for at in group_rows(count, size)]


def group_rows(count: int, size: int) -> list[Array]:
    """Return the row numbers 0 .. count - 1 in groups of exactly ``size``; the last group is filled up from row 0 on."""
    return list(np.resize(np.arange(count), (max(1, -(-count // size)), size)))


@torch.no_grad()
def compare(
    subject: DeployModel,
    forward: Callable[[Tensors], torch.Tensor],
    rows: Tensors,
    *,
    batch: int = 1,
    exact: bool = True,
) -> float:
    """Return the largest difference between ``forward`` and torch, relative to the largest output of torch.

    Args:
        subject: the model.
        forward: function that runs the exported model on inputs named as in the model.
        rows: data to compare on, by names of the model's inputs.
        batch: samples of one call. Torch computes in the same groups, because norms may use statistics of the batch.
        exact: accept only differences that rounding of float32 explains. If false, accept all but NaN.

    Raises:
        ExportError: if the difference is not accepted.
    """
    count = len(rows[INPUT])
    step = batch if batch > 1 else count
    groups = [{name: each[at] for name, each in rows.items()} for at in group_rows(count, step)]
    right = copy_module(subject.module).double()
    strayed = scale = 0.0
    errors = []
    for group in groups:
        given = subject.rows(group)
        found, expected = forward(group), subject.expected(given)
        inputs = {**given, INPUT: subject.preprocessing(given[INPUT])} if subject.preprocessing else given
        strayed = max(strayed, float((call_with_inputs(right, _to_double(inputs)) - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
        errors.append(float((found - expected).abs().max()))
    error = float(np.max(errors))  # NaN if one is
    allowed = RELATIVE * scale + ABSOLUTE + FACTOR * strayed if exact else float("inf")
    if not error <= allowed:  # NaN never passes
        raise ExportError(
            f"the {OUTPUT} of the exported model differ from torch by {error:.3g}, allowed are {allowed:.3g}; "
            + ("the rule of one of its ops is wrong" if exact else "leave `quantize` out"),
            error=error,
            allowed=allowed,
        )
    return error / scale if scale else error


def _to_double(rows: Tensors) -> Tensors:
    return {name: each.double() if each.is_floating_point() else each for name, each in rows.items()}
