"""A model for inference as one ONNX file: weights and statistics inside, samples in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.copies import copy_module
from edgefl.models.layers.given import called
from edgefl.programs.submodels.frozen_forward import chunk_forward
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.errors import ExportError
from exporters.onnx import capture_for
from exporters.onnx.model import to_onnx
from exporters.verify.graphs import ABSOLUTE, FACTOR, RELATIVE, verify
from exporters.verify.rounding import Array

INPUT, OUTPUT = "x", "logits"
_BATCH = "batch.0."
_SEED = 1


@dataclass(frozen=True)
class Artifact:
    """An ONNX model that reads INPUT (``batch``, *sample) and the other ``inputs``, and gives OUTPUT, with what was measured
    of it.

    ``max_rel_error``: largest difference to torch on the rows that it was checked on, relative to the largest logit.
    """

    model: bytes = field(repr=False)
    batch: int
    inputs: tuple[str, ...]
    max_rel_error: float
    rows: int


def deploy(module: nn.Sequential, sample: TensorSpec, rows: Tensors, *, batch: int = 1) -> Artifact:
    """Export ``module`` as it is in inference mode, ``batch`` samples at a time.

    The graph is first compared with torch on random weights and samples, then the finished file on ``rows`` of real data,
    (n, *sample) of INPUT and of each other input by its name, the last group filled up with the first rows. Inputs keep
    their names in the file, and those that the output does not depend on are not in it. Raises ExportError if it cannot be
    exported or differs.
    """
    function = _of_one_sample(chunk_forward(module, sample, batch=batch))
    graph = to_onnx(capture_for(function))
    verify(function, graph, _SEED)
    values = {f"weights.{name}": tensor.numpy() for name, tensor in module.state_dict().items()}
    model = _filled(graph, values)
    count = len(rows[INPUT])
    groups = [{name: each[at] for name, each in rows.items()} for at in grouped(count, batch)]
    inputs = tuple(port.name for port in onnx.load_from_string(model).graph.input)
    return Artifact(model, batch, inputs, _compared(module, model, groups), count)


def _of_one_sample(function: Function) -> Function:
    """``function``, where the sample that units read again is its x."""
    again = _BATCH + SAMPLE
    if again not in function.inputs:
        return function
    inputs = {name: spec for name, spec in function.inputs.items() if name != again}
    return replace(
        function, fn=lambda given: function.fn({**given, again: given[_BATCH + INPUT]}), inputs=inputs
    )


def grouped(count: int, size: int) -> list[Array]:
    """Row numbers 0 .. count - 1 in groups of exactly ``size``; the last one goes on with row 0, 1, ..."""
    return list(np.resize(np.arange(count), (max(1, -(-count // size)), size)))


def _filled(graph: bytes, values: Mapping[str, Array]) -> bytes:
    """The model with these inputs as constants, and plain names for the ports that are left."""
    proto = onnx.load_from_string(graph)
    inputs = [port for port in proto.graph.input if port.name not in values]
    read = [port.name for port in proto.graph.input if port.name in values]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(values[name]), name) for name in read
    )
    plain = {port.name: port.name.removeprefix(_BATCH) for port in inputs}
    if OUTPUT in plain.values():
        raise ExportError(
            f"an input of the model is called {OUTPUT!r}, as the output of the file is: give it another name",
            input=OUTPUT,
        )
    # A name without a dot may be that of a value within the graph.
    inner = {name: f"inner.{name}" for name in plain.values()}
    _rename(proto.graph, inner | plain | {proto.graph.output[0].name: OUTPUT})
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for port in (*graph.input, *graph.output):
        port.name = names.get(port.name, port.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


@torch.no_grad()
def _compared(module: nn.Sequential, model: bytes, groups: Sequence[Tensors]) -> float:
    """Largest relative difference to torch; ExportError if it is more than float32 explains."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    exact = copy_module(module).double()
    read = [port.name for port in session.get_inputs()]
    logits = [
        torch.from_numpy(session.run([OUTPUT], {name: each[name].numpy() for name in read})[0])
        for each in groups
    ]
    expected = [called(module, each) for each in groups]
    right = [called(exact, _doubled(each)) for each in groups]
    scale = max(float(out.abs().max()) for out in expected)
    error = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    strayed = max(float((a - b).abs().max()) for a, b in zip(expected, right, strict=True))
    allowed = RELATIVE * scale + ABSOLUTE + FACTOR * strayed
    if not error <= allowed:  # NaN never passes
        raise ExportError(
            f"the logits of the exported model differ from torch by {error:.3g}, allowed are {allowed:.3g}; the rule of "
            "one of its ops is wrong",
            error=error,
            allowed=allowed,
        )
    return error / scale if scale else error


def _doubled(rows: Tensors) -> Tensors:
    return {name: each.double() if each.is_floating_point() else each for name, each in rows.items()}
