"""Preprocessing of samples as a part of a model: pixels, sounds and columns of tables become its first input."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl.models.copies import copy_module
from edgefl.models.inputs import call_with_inputs
from edgefl.models.layers.log_mel import LogMel
from edgefl.models.torch_functions.recurrent import recurring
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageSpec, SeriesSpec, SoundSpec, TableSpec
from edgefl_export.deploy.target import DeployTarget


class PreprocessingLayer(Protocol):
    """Interface of a layer that computes the first input of a model from raw samples.

    Attributes:
        example: one raw sample, without a batch axis.
        dynamic: axes of a raw sample that may have any size.
    """

    @property
    def example(self) -> Tensor: ...

    @property
    def dynamic(self) -> tuple[int, ...]: ...

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the first input of the model, (n, *sample), for raw samples (n, ...)."""

    def raw(self, x: Tensor) -> Tensor:
        """Return raw samples whose first input is ``x``, or arbitrary ones of equal number if not :attr:`invertible`."""

    @property
    def invertible(self) -> bool:
        """True if :meth:`raw` inverts the layer, so that the accuracy of the file can be measured."""


class PixelLayer(nn.Module):
    """Preprocessing of images: pixels (n, H, W, C), uint8, to floats (n, C, height, width).

    Images are resized with an antialiased bilinear filter as in Pillow, rounded, and scaled.

    Args:
        data: shape of a sample, scale, shift, and the value of white.
        resize: accept images of any size; else H and W must be those of a sample.
    """

    invertible = True

    def __init__(self, data: DataSpec, *, resize: bool) -> None:
        super().__init__()
        channels, self.height, self.width = data.shape
        self.scale, self.shift, self.resize = data.scale, data.shift, resize
        self.white = data.reader.white if isinstance(data.reader, ImageSpec) else 255
        side = (2 * self.height + 1, 2 * self.width + 3) if resize else (self.height, self.width)
        self.example = torch.zeros((*side, channels), dtype=torch.uint8)
        self.dynamic: tuple[int, ...] = (0, 1) if resize else ()

    def forward(self, raw: Tensor) -> Tensor:
        """Return floats (n, C, height, width), the first input of the model, for pixels (n, H, W, C), uint8."""
        pixels = raw.permute(0, 3, 1, 2).float()
        if self.resize:
            size = (self.height, self.width)
            pixels = (
                nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True).round().clamp(0, 255)
            )
        if self.white != 255:
            pixels = (pixels * self.white + 127).div(255).floor()
        return pixels * self.scale + self.shift

    def raw(self, x: Tensor) -> Tensor:
        """Return the pixels (n, height, width, C), uint8, for floats ``x``."""
        pixels = ((x - self.shift) / self.scale).round()
        if self.white != 255:
            pixels = (pixels * 255 / self.white).floor()
        return pixels.clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8)


class SoundLayer(nn.Module):
    """Preprocessing of sounds: waves (n, length) in [-1, 1] to log-mel features."""

    dynamic: tuple[int, ...] = ()
    invertible = False

    def __init__(self, reader: SoundSpec) -> None:
        super().__init__()
        self.features = LogMel.of(reader)
        self.example = torch.zeros(reader.length)

    def forward(self, raw: Tensor) -> Tensor:
        """Return the features of sounds (n, length)."""
        made: Tensor = self.features(raw)
        return made

    def raw(self, x: Tensor) -> Tensor:
        """Return len(x) sounds of random noise with a fixed seed, because features cannot be inverted."""
        generator = torch.Generator().manual_seed(0)
        return torch.rand((len(x), *self.example.shape), generator=generator) * 2 - 1


class ColumnLayer(nn.Module):
    """Preprocessing of tables and series: subtracts the mean of each column and divides by its standard deviation."""

    dynamic: tuple[int, ...] = ()
    invertible = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, data: DataSpec, reader: TableSpec | SeriesSpec) -> None:
        super().__init__()
        count = len(reader.columns)
        across = isinstance(reader, SeriesSpec) and not reader.channels_last
        shape = (count, 1) if across else (count,)
        for name, numbers in (
            ("mean", reader.mean or [0.0] * count),
            ("deviation", reader.deviation or [1.0] * count),
        ):
            self.register_buffer(name, torch.tensor(numbers).reshape(shape), persistent=False)
        self.example = torch.zeros(data.shape)

    def forward(self, raw: Tensor) -> Tensor:
        """Return raw columns, normalized: the first input of the model."""
        return (raw - self.mean) / self.deviation

    def raw(self, x: Tensor) -> Tensor:
        """Return columns that are not normalized, as files contain them."""
        return x * self.deviation + self.mean


def preprocessing_of(data: DataSpec, *, pixels: bool, resize: bool) -> PreprocessingLayer | None:
    """Return the layer that computes samples of ``data`` from raw ones, or None if raw samples are used as they are.

    Args:
        data: shape of the samples, and the reader that makes them from files.
        pixels: true if the samples are images whose raw pixels are integers.
        resize: true if the operators of the format can resize images of any size.
    """
    reader = data.reader
    if pixels and (reader is None or isinstance(reader, ImageSpec)):
        return PixelLayer(data, resize=resize)
    if isinstance(reader, SoundSpec) and reader.mels:
        return SoundLayer(reader)
    if isinstance(reader, TableSpec | SeriesSpec) and (reader.mean or reader.deviation) and not data.below:
        return ColumnLayer(data, reader)
    return None


def raw_spec(layer: PreprocessingLayer) -> TensorSpec:
    """Return shape and dtype of one raw sample of ``layer``."""
    return TensorSpec.of(layer.example)


# A model for inference as a program of torch.export, which every format starts from.

INPUT, OUTPUT = "x", "logits"
"""Name of the first input within the model, and of the output of a file."""
MOST_ROWS = 64
"""Most samples of one call of a .pte file with a dynamic batch."""
_ROWS = 2
"""Rows of an example whose batch is dynamic: torch.export takes a batch of 1 for a constant."""


@dataclass(frozen=True, eq=False)
class DeployModel:
    """Model to deploy.

    Attributes:
        module: the model in inference mode.
        inputs: shape and dtype of one sample of each input; the first is called :data:`INPUT`.
        names: names of inputs in the file, by name in the model; an input without an entry keeps its name.
        preprocessing: layer of the file that computes the first input from raw samples; None if the caller does that.
    """

    module: nn.Sequential
    inputs: Mapping[str, TensorSpec]
    names: Mapping[str, str] = field(default_factory=dict)
    preprocessing: PreprocessingLayer | None = None

    def name(self, own: str) -> str:
        """Return the name in the file of the input that the model calls ``own``."""
        return self.names.get(own, own)

    def rows(self, inputs: Tensors) -> Tensors:
        """Return model inputs as the file reads them: the first is turned into raw samples if the file preprocesses."""
        if self.preprocessing is None:
            return inputs
        return {**inputs, INPUT: self.preprocessing.raw(inputs[INPUT])}

    def expected(self, inputs: Tensors) -> Tensor:
        """Return the output of the model in torch for inputs as the file reads them (:meth:`rows`)."""
        if self.preprocessing is not None:
            inputs = {**inputs, INPUT: self.preprocessing(inputs[INPUT])}
        return call_with_inputs(self.module, inputs)


class PositionalModel(nn.Module):
    """Module that calls the model of a subject, with its preprocessing, on inputs by position.

    Args:
        subject: the model.
        half: compute in float16, with a converted copy of the model.
    """

    def __init__(self, subject: DeployModel, half: bool = False) -> None:
        super().__init__()
        self.units = copy_module(subject.module).half() if half else subject.module
        self.own, self.prepare, self.half_floats = tuple(subject.inputs), subject.preprocessing, half

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output. Inputs and output are float32 even if the model computes in float16."""
        named = dict(zip(self.own, inputs, strict=True))
        if self.prepare is not None:
            named[INPUT] = self.prepare(named[INPUT])
        if not self.half_floats:
            return call_with_inputs(self.units, named)
        floats = {name: each.half() if each.is_floating_point() else each for name, each in named.items()}
        return call_with_inputs(self.units, floats).float()


@dataclass(frozen=True, eq=False)
class InferenceProgram:
    """Result of torch.export for a model.

    Attributes:
        subject: the model, without inputs that its output does not depend on.
        exported: the program, with the inputs of ``subject`` in order.
        example: inputs that the program was exported with, each with a batch axis.
        shapes: dynamic axes of each input.
    """

    subject: DeployModel
    exported: ExportedProgram
    example: tuple[Tensor, ...]
    shapes: tuple[dict[int, Any], ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs in the file, in order."""
        return tuple(map(self.subject.name, self.subject.inputs))


def program_of(subject: DeployModel, target: DeployTarget, *, half: bool = False) -> InferenceProgram:
    """Export a model by torch.export, without the inputs that its output does not depend on.

    Args:
        subject: the model.
        target: format, batch size and dynamic axes.
        half: compute in float16.

    Raises:
        ExportError: if torch cannot export the model, or if an input has the name of the output.
    """
    program = _export(subject, target, half)
    read = _read(program.exported)
    used = {name: spec for (name, spec), there in zip(subject.inputs.items(), read, strict=True) if there}
    if len(used) < len(read):
        program = _export(replace(subject, inputs=used), target, half)
    if OUTPUT in program.inputs:
        raise ExportError(
            f"an input of the model is called {OUTPUT!r}, as the output of the file is: give it another name",
            input=OUTPUT,
        )
    return program


def _export(subject: DeployModel, target: DeployTarget, half: bool) -> InferenceProgram:
    rows = _ROWS if target.dynamic_batch else target.batch
    # ExecuTorch plans memory for the largest batch.
    any_batch = Dim("batch", min=1, max=MOST_ROWS) if target.format == "executorch" else Dim.DYNAMIC
    example: list[Tensor] = []
    shapes: list[dict[int, Any]] = []
    for name, spec in subject.inputs.items():
        prepare = subject.preprocessing if name == INPUT else None
        raw = prepare.example if prepare else spec.zeros()
        example.append(raw[None].expand(rows, *raw.shape).contiguous())
        free = {axis + 1: Dim.DYNAMIC for axis in (prepare.dynamic if prepare else ())}
        shapes.append(({0: any_batch} if target.dynamic_batch else {}) | free)
    return InferenceProgram(
        subject,
        export(PositionalModel(subject, half).eval(), example, (tuple(shapes),)),
        tuple(example),
        tuple(shapes),
    )


def export(module: nn.Module, example: Sequence[Tensor], shapes: Any) -> ExportedProgram:
    """Return the program of ``module`` from ``torch.export``, without warnings.

    Args:
        module: module to export.
        example: positional inputs.
        shapes: dynamic axes, as torch.export takes them.

    Raises:
        ExportError: if torch cannot export the module.
    """
    free = any(shape for shape in shapes[0]) if isinstance(shapes[0], tuple) else any(shapes)
    try:
        with warnings.catch_warnings(), torch.no_grad(), recurring():
            warnings.simplefilter("ignore")
            return torch.export.export(module, tuple(example), dynamic_shapes=shapes if free else None)
    except Exception as error:  # torch.export raises dozens of unrelated types
        raise ExportError(
            f"torch.export cannot export the model: {_first_line(error)}; change the layer it names, or export with a "
            "fixed batch"
        ) from error


def _read(program: ExportedProgram) -> list[bool]:
    """Return a flag for each user input in order: true if an op other than an unused check reads it."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            node = nodes[spec.arg.name]
            found.append(any(user.users or user.op == "output" for user in node.users))
    return found


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
