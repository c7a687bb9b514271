"""Deployed models as ONNX files for ONNX Runtime."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes import common as passes

from edgefl.errors import ExportError
from edgefl.system.distribution import version
from edgefl.wire.tensors import Array
from edgefl_export.deploy.program import OUTPUT, InferenceProgram
from edgefl_export.deploy.target import OPSET, DeployTarget
from edgefl_export.releases import least_onnxruntime

_LIMIT = (1 << 31) - (1 << 20)
"""Most bytes of a file, with room for its metadata: protobuf reads none of 2 GiB."""

Rows = Sequence[Mapping[str, Array]]
"""Groups of rows, inputs by their names in the file."""


class OnnxFile:
    """An ONNX model before its metadata are known."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, calibration: Rows) -> None:
        """Write the program.

        Args:
            program: the model.
            target: opset and quantization.
            calibration: groups of rows that int8 ranges are measured on.

        Raises:
            ExportError: if an operator cannot be expressed.
        """
        self._proto = _written(program, target)
        if target.quantize == "float16":
            self._proto = _float16(self._proto)
        elif target.quantize == "int8":
            self._proto = _int8(self._proto, calibration)
        opsets = [each for each in self._proto.opset_import if each.domain in ("", "ai.onnx.ml")]
        self._proto.ir_version = onnx.helper.find_min_ir_version_for(opsets)
        self._proto.producer_name, self._proto.producer_version = "edgefl", version()
        del self._proto.metadata_props[:]
        onnx.checker.check_model(self._proto, full_check=True)

    @property
    def runtime(self) -> dict[str, Any]:
        """The runtime that loads the file."""
        opset = next(each.version for each in self._proto.opset_import if each.domain == "")
        return {
            "name": "onnxruntime",
            "least": least_onnxruntime(opset, self._proto.ir_version),
            "opset": opset,
            "ir": self._proto.ir_version,
        }

    @property
    def float_weights(self) -> dict[str, int]:
        """Return the number of float32 weights that each operator reads, scales of quantization left out."""
        graph, counts = self._proto.graph, Counter[str]()
        sizes = {
            each.name: int(np.prod(each.dims))
            for each in graph.initializer
            if each.data_type == onnx.TensorProto.FLOAT
        }
        for node in graph.node:
            if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                counts[node.op_type] += sum(sizes.get(name, 0) for name in node.input)
        return counts

    def model(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the file with ``metadata``: an entry for each key, texts as they are and others in JSON."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        texts = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()
        }
        onnx.helper.set_model_props(proto, texts)
        return bytes(proto.SerializeToString(deterministic=True))


class OnnxSession:
    """A model in ONNX Runtime."""

    def __init__(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(port.name for port in self._session.get_inputs())

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for rows by the names of the inputs; those that the model does not read are ignored."""
        return np.asarray(self._session.run([OUTPUT], {name: rows[name] for name in self.inputs})[0])


def _written(program: InferenceProgram, target: DeployTarget) -> onnx.ModelProto:
    opset = target.opset or OPSET
    axes = [
        {axis: "batch" if axis == 0 else f"size{axis}" for axis in free} if free else {}
        for free in program.shapes
    ]
    try:
        with quiet():
            made = torch.onnx.export(
                program.exported,
                input_names=list(program.inputs),
                output_names=[OUTPUT],
                opset_version=opset,
                optimize=True,
                verbose=False,
                external_data=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        line = next(
            (line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
        )
        raise ExportError(f"torch.onnx cannot write the model: {line[:300]}; write it as .pte") from error
    assert made is not None
    passes.ClearMetadataAndDocStringPass()(made.model)
    proto = made.model_proto
    if proto.ByteSize() > _LIMIT:
        raise ExportError(
            f"expected a model below 2 GiB, which protobuf reads, found {proto.ByteSize():,} bytes; use `quantize` float16"
        )
    found = next(each.version for each in proto.opset_import if each.domain == "")
    if found != opset:
        raise ExportError(
            f"expected operators of opset {opset}, found one that needs opset {found}; use `opset` {found}",
            opset=opset,
        )
    for port, named in zip(proto.graph.input, axes, strict=True):
        for axis, name in named.items():
            port.type.tensor_type.shape.dim[axis].dim_param = name
    if target.dynamic_batch:
        proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:]  # they have other names for the dynamic axes
    return proto


def _float16(proto: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet():
        made = ir.from_proto(convert_float_to_float16(proto, keep_io_types=True))
    passes.TopologicalSortPass()(made)  # the casts of the inputs come last
    sorted_proto: onnx.ModelProto = ir.to_proto(made)
    del sorted_proto.graph.value_info[:]
    return sorted_proto


def _int8(proto: onnx.ModelProto, calibration: Rows) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rows = iter(calibration)

        def get_next(self) -> Mapping[str, Array] | None:
            return next(self._rows, None)

    with tempfile.TemporaryDirectory() as folder, quiet():
        file = Path(folder) / "int8.onnx"
        quantize_static(
            proto,
            file,
            _CalibrationReader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(file)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of exporters and quantizers about missing packages and annotations while the block runs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
