"""A model for inference as one ONNX file: weights and statistics inside, images in, logits out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.programs.submodels.frozen_forward import chunk_forward
from edgefl.wire.errors import ExportError
from exporters.capture.trace import capture
from exporters.onnx.model import to_onnx
from exporters.verify.graphs import ABSOLUTE, FACTOR, RELATIVE, verify
from exporters.verify.rounding import Array

INPUT, OUTPUT = "x", "logits"
_SEED = 1


@dataclass(frozen=True)
class Artifact:
    """An ONNX model that reads INPUT (``batch``, *sample) and gives OUTPUT, with what was measured of it.

    ``max_rel_error``: largest difference to torch on the rows that it was checked on, relative to the largest logit.
    """

    model: bytes
    batch: int
    max_rel_error: float
    rows: int


def deploy(module: nn.Sequential, sample: TensorSpec, rows: Tensor, *, batch: int = 1) -> Artifact:
    """Export ``module`` as it is in inference mode, ``batch`` images at a time.

    The graph is first compared with torch on random weights and images, then the finished file on ``rows`` (n, *sample)
    of real data, the last group filled up with the first rows. Raises ExportError if it cannot be exported or differs.
    """
    function = chunk_forward(module, sample, batch=batch)
    graph = to_onnx(capture(function))
    verify(function, graph, _SEED)
    values = {f"weights.{name}": tensor.numpy() for name, tensor in module.state_dict().items()}
    model = _filled(graph, values)
    groups = [rows[at] for at in grouped(len(rows), batch)]
    return Artifact(model, batch, _compared(module, model, groups), len(rows))


def grouped(count: int, size: int) -> list[Array]:
    """Row numbers 0 .. count - 1 in groups of exactly ``size``; the last one goes on with row 0, 1, ..."""
    return list(np.resize(np.arange(count), (max(1, -(-count // size)), size)))


def _filled(graph: bytes, values: Mapping[str, Array]) -> bytes:
    """The model with these inputs as constants, and plain names for the two ports that are left."""
    proto = onnx.load_from_string(graph)
    inputs = [port for port in proto.graph.input if port.name not in values]
    read = [port.name for port in proto.graph.input if port.name in values]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(values[name]), name) for name in read
    )
    _rename(proto.graph, {inputs[0].name: INPUT, proto.graph.output[0].name: OUTPUT})
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for port in (*graph.input, *graph.output):
        port.name = names.get(port.name, port.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


@torch.no_grad()
def _compared(module: nn.Sequential, model: bytes, groups: Sequence[Tensor]) -> float:
    """Largest relative difference to torch; ExportError if it is more than float32 explains."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    exact = copy.deepcopy(module).double()
    logits = [torch.from_numpy(session.run([OUTPUT], {INPUT: x.numpy()})[0]) for x in groups]
    expected = [module(x) for x in groups]
    right = [exact(x.double() if x.is_floating_point() else x) for x in groups]
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
