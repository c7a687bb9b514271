"""Deployed files: ONNX for ONNX Runtime, .pte for ExecuTorch, .safetensors with a loader of a few lines of torch."""

from __future__ import annotations

import contextlib
import copy
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
from safetensors.torch import load, save
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from edgefl.errors import ConfigError, ExportError
from edgefl.system.distribution import install, version
from edgefl.wire.tensors import Array
from edgefl_export.capture.patches import Patch, patched
from edgefl_export.deploy.program import OUTPUT, InferenceProgram, export
from edgefl_export.deploy.target import OPSET, DeployTarget
from edgefl_export.releases import least_executorch, least_onnxruntime

# Deployed models as ONNX files for ONNX Runtime.

_LIMIT = (1 << 31) - (1 << 20)
"""Most bytes of a file, with room for its metadata: protobuf reads none of 2 GiB."""

Rows = Sequence[Mapping[str, Array]]
"""Batches of calibration data; each maps the name of an input in the file to its array."""


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


class OnnxFile:
    """Writer of an ONNX file. The model is converted and quantized once; metadata are added per file."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, calibration: Rows) -> None:
        """Convert the program to ONNX and check it.

        Args:
            program: the model.
            target: opset and quantization.
            calibration: batches that int8 ranges are measured on.

        Raises:
            ExportError: if ONNX cannot express an operator, or if the model is larger than 2 GiB.
        """
        self._proto = _to_onnx(program, target)
        if target.quantize == "float16":
            self._proto = _float16(self._proto)
        elif target.quantize == "int8":
            self._proto = _onnx_int8(self._proto, calibration)
        opsets = [each for each in self._proto.opset_import if each.domain in ("", "ai.onnx.ml")]
        self._proto.ir_version = onnx.helper.find_min_ir_version_for(opsets)
        self._proto.producer_name, self._proto.producer_version = "edgefl", version()
        del self._proto.metadata_props[:]
        onnx.checker.check_model(self._proto, full_check=True)

    @property
    def runtime(self) -> dict[str, Any]:
        """Facts about the runtime: its name, the first release that loads the file, opset and IR version."""
        opset = next(each.version for each in self._proto.opset_import if each.domain == "")
        return {
            "name": "onnxruntime",
            "least": least_onnxruntime(opset, self._proto.ir_version),
            "opset": opset,
            "ir": self._proto.ir_version,
        }

    @property
    def float_weights(self) -> dict[str, int]:
        """Number of float32 weights by operator that reads them, without the scales of quantization."""
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
        """Return the bytes of the file. Each entry of ``metadata`` becomes a metadata property, as text or JSON."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        onnx.helper.set_model_props(proto, _texts(metadata))
        return bytes(proto.SerializeToString(deterministic=True))


class OnnxSession:
    """ONNX model loaded into ONNX Runtime."""

    def __init__(self, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(port.name for port in self._session.get_inputs())

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for arrays by name of the input. Entries that the model does not read are ignored."""
        return np.asarray(self._session.run([OUTPUT], {name: rows[name] for name in self.inputs})[0])


def _to_onnx(program: InferenceProgram, target: DeployTarget) -> onnx.ModelProto:
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


def _onnx_int8(proto: onnx.ModelProto, calibration: Rows) -> onnx.ModelProto:
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


# Deployed models as .pte files for ExecuTorch.

METADATA = "metadata"
"""Method of a file that returns its metadata as a JSON text."""


class ExecuTorchFile:
    """Writer of a .pte file. The model is quantized and lowered once; metadata are added per file."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, calibration: Rows) -> None:
        """Quantize the program and lower it to ExecuTorch's edge dialect.

        Args:
            program: the model.
            target: backend and quantization.
            calibration: batches that int8 ranges are measured on.

        Raises:
            ConfigError: if the package executorch or torchao is not installed.
            ExportError: if ExecuTorch cannot lower the model.
        """
        exported = program.exported
        with quiet():
            if target.quantize == "int8":
                exported = _program_int8(program, calibration)
            self.float_weights = _float_weights(exported)
            self._edge = _lower(exported, target)

    @property
    def runtime(self) -> dict[str, Any]:
        """Facts about the runtime: its name and the first release that loads the file."""
        return {"name": "executorch", "least": least_executorch()}

    def model(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the bytes of the file. Its method ``metadata`` returns ``metadata`` as a JSON text."""
        from executorch.exir import EdgeProgramManager

        with quiet():
            edge = EdgeProgramManager(
                {
                    "forward": copy.deepcopy(self._edge.exported_program())
                },  # it is changed while it is written
                constant_methods={METADATA: json.dumps(metadata)},
                compile_config=self._edge.compile_config,
            )
            return bytes(edge.to_executorch().buffer)


class ExecuTorchProgram:
    """Program loaded into ExecuTorch's runtime, with the names of its inputs in order."""

    def __init__(self, model: bytes, inputs: Sequence[str]) -> None:
        from edgefl_export.executorch.silent_import import portable_lib

        self.inputs = tuple(inputs)
        self._model = model  # the runtime reads these bytes, and keeps no reference
        self._module = portable_lib()._load_for_executorch_from_buffer(model)

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for arrays by name of the input."""
        given = [torch.from_numpy(np.ascontiguousarray(rows[name])) for name in self.inputs]
        return self._module.forward(given)[0].numpy().copy()  # type: ignore[no-any-return]


def _lower(exported: ExportedProgram, target: DeployTarget) -> Any:
    try:
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    except ImportError as error:
        raise ConfigError(
            f".pte files need the package executorch: {install('executorch')}, or write an .onnx file"
        ) from error
    config = EdgeCompileConfig(_check_ir_validity=False)
    try:
        if target.backend == "portable":
            return to_edge_transform_and_lower(exported, compile_config=config)
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        with patched(*_needless_patterns(exported)):
            return to_edge_transform_and_lower(
                exported, partitioner=[XnnpackPartitioner()], compile_config=config
            )
    except Exception as error:  # ExecuTorch's passes raise dozens of unrelated types
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"ExecuTorch cannot lower the model: {line[:300]}; write an .onnx file") from error


def _float_weights(exported: ExportedProgram) -> dict[str, int]:
    """Return the number of float32 weights by name of the operator that reads them."""
    tensors, counts = {**exported.state_dict, **exported.constants}, Counter[str]()
    nodes = exported.graph.find_nodes(op="placeholder")
    for spec, node in zip(exported.graph_signature.input_specs, nodes, strict=True):
        tensor = tensors.get(str(spec.target))
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
            for user in node.users:
                counts[str(user.target).removeprefix("aten.").split(".")[0]] += tensor.numel()
    return counts


def _needless_patterns(exported: ExportedProgram) -> list[Patch]:
    """Return patches that disable XNNPACK's search for the patterns of resizing and attention that cannot match.

    For a search, XNNPACK first exports example modules, which takes longer than lowering a small model. A search is
    disabled if ``exported`` has none of the operators of its pattern.
    """
    from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa

    operators = " ".join(str(node.target) for node in exported.graph.nodes)
    patches = []
    if "upsample" not in operators and "index" not in operators:
        patches.append(Patch(bilinear_2d, "get_graphs_dict", dict))
    if "softmax" not in operators and "attention" not in operators:
        patches.append(Patch(sdpa, "get_graphs", list))
    return patches


def _program_int8(program: InferenceProgram, calibration: Rows) -> ExportedProgram:
    """Return the program quantized to int8 weights (per channel) and activations by torchao's PT2E flow.

    Runs the program on ``calibration`` to measure ranges. Raises ConfigError if a package is not installed.
    """
    try:
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    except ImportError as error:
        raise ConfigError(
            f"int8 in .pte files needs the packages executorch and torchao: {install('executorch')}, or use `quantize` "
            "float16"
        ) from error
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(program.exported.module(), quantizer)
    with torch.no_grad():
        for rows in calibration:
            prepared(*(torch.from_numpy(rows[name]) for name in program.inputs))
    return export(convert_pt2e(prepared), program.example, program.shapes)


# Deployed models as weights in .safetensors with a loader of a few lines of torch.

_LOADER = '''"""`load()` returns a function of {inputs}, which returns {output}.

It needs torch and safetensors alone, and reads the weights from the .safetensors file of the same name, whose
metadata describe the inputs. Written by edgefl {version}.
"""

from math import inf, nan  # noqa: F401
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import device  # noqa: F401

NAMES = {names}


def load(path=Path(__file__).with_suffix(".safetensors")):
    """Return the model as a function of tensors."""
    weights = load_file(path)
    held = [weights[name].to(dtype) for name, dtype in NAMES.items()]

    @torch.inference_mode()
    def model({inputs}):
        return forward(None, *held, {inputs})[0]

    return model


{forward}
'''


class TorchFile:
    """Writer of a .safetensors file and of its loader in Python. Metadata are added per file."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, names: Mapping[str, str]) -> None:
        """Collect the weights that the program reads and generate the loader.

        Args:
            program: the model.
            target: with ``quantize`` float16, weights are stored as float16 and the loader converts them to float32.
            names: names in the file by name of the tensor in the program; others keep their names.

        Raises:
            ExportError: if the program contains control flow.
        """
        exported = program.exported
        module, signature = copy.deepcopy(exported.graph_module), exported.graph_signature
        if [*module.named_children()]:
            raise ExportError(
                "expected a model of plain operators for .safetensors, found control flow; write .onnx"
            )
        state = {**exported.state_dict, **exported.constants}
        self._weights: dict[str, Tensor] = {}
        dtypes: list[tuple[str, str]] = []
        nodes = module.graph.find_nodes(op="placeholder")
        for spec, node in zip(signature.input_specs, nodes, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                continue
            if not node.users:
                module.graph.erase_node(node)
                continue
            own = str(spec.target).removeprefix("units.")
            tensor = state[str(spec.target)].detach().contiguous()
            half = target.quantize == "float16" and tensor.dtype == torch.float32
            name = names.get(own, own)
            self._weights[name] = (tensor.half() if half else tensor).clone()
            dtypes.append((name, str(tensor.dtype)))
        module.recompile()
        self.loader = _loader(program, module.code, dtypes)

    @property
    def runtime(self) -> dict[str, Any]:
        """Facts about the runtime: the name torch, and the release of torch that wrote the loader."""
        return {"name": "torch", "least": ".".join(torch.__version__.split(".")[:2])}

    def model(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the bytes of the .safetensors file. Each entry of ``metadata`` is stored as text or JSON."""
        return bytes(save(self._weights, metadata=_texts(metadata)))


class LoadedTorchFile:
    """Model of a .safetensors file, created by executing the Python source of its loader on the file's bytes."""

    def __init__(self, model: bytes, loader: str, inputs: tuple[str, ...]) -> None:
        space: dict[str, Any] = {"__file__": "model.py", "__name__": "loader"}
        exec(compile(loader, "<loader>", "exec"), space)
        space["load_file"] = lambda _path: load(model)
        self._call, self.inputs = space["load"](), inputs

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for arrays by name of the input."""
        return self._call(*(torch.from_numpy(rows[name]) for name in self.inputs)).numpy()  # type: ignore[no-any-return]


def _loader(program: InferenceProgram, code: str, dtypes: list[tuple[str, str]]) -> str:
    names = "\n".join(f"    {name!r}: {dtype}," for name, dtype in dtypes)
    return _LOADER.format(
        inputs=", ".join(program.inputs),
        output=OUTPUT,
        version=version(),
        names=f"{{\n{names}\n}}",
        forward=code.strip(),
    )
