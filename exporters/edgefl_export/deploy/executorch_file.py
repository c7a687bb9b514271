"""Deployed models as .pte files for ExecuTorch."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from edgefl.errors import ConfigError, ExportError
from edgefl.system.distribution import install
from edgefl.wire.tensors import Array
from edgefl_export.capture.patches import Patch, patched
from edgefl_export.deploy.onnx_file import Rows, quiet
from edgefl_export.deploy.program import InferenceProgram, export
from edgefl_export.deploy.target import DeployTarget
from edgefl_export.releases import least_executorch

METADATA = "metadata"
"""Method of a file that returns its metadata as a JSON text."""


class ExecuTorchFile:
    """An ExecuTorch program before its metadata are known."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, calibration: Rows) -> None:
        """Lower the program.

        Args:
            program: the model.
            target: backend and quantization.
            calibration: groups of rows that int8 ranges are measured on.

        Raises:
            ConfigError: if a package is missing.
            ExportError: if an operator has no kernel.
        """
        exported = program.exported
        with quiet():
            if target.quantize == "int8":
                exported = _int8(program, calibration)
            self.float_weights = _float_weights(exported)
            self._edge = _lowered(exported, target)

    @property
    def runtime(self) -> dict[str, Any]:
        """The runtime that loads the file."""
        return {"name": "executorch", "least": least_executorch()}

    def model(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the file; its method ``metadata`` returns the metadata as JSON."""
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
    """A program in ExecuTorch's runtime."""

    def __init__(self, model: bytes, inputs: Sequence[str]) -> None:
        from edgefl_export.executorch.silent_import import portable_lib

        self.inputs = tuple(inputs)
        self._model = model  # the runtime reads these bytes, and keeps no reference
        self._module = portable_lib()._load_for_executorch_from_buffer(model)

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for rows by the names of the inputs."""
        given = [torch.from_numpy(np.ascontiguousarray(rows[name])) for name in self.inputs]
        return self._module.forward(given)[0].numpy().copy()  # type: ignore[no-any-return]


def _lowered(exported: ExportedProgram, target: DeployTarget) -> Any:
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
    """Return the number of float32 weights that each operator reads."""
    tensors, counts = {**exported.state_dict, **exported.constants}, Counter[str]()
    nodes = exported.graph.find_nodes(op="placeholder")
    for spec, node in zip(exported.graph_signature.input_specs, nodes, strict=True):
        tensor = tensors.get(str(spec.target))
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
            for user in node.users:
                counts[str(user.target).removeprefix("aten.").split(".")[0]] += tensor.numel()
    return counts


def _needless_patterns(exported: ExportedProgram) -> list[Patch]:
    """Return patches that keep XNNPACK from searching for resizing and attention if ``exported`` has no operators of them.

    XNNPACK exports example modules as patterns first, which takes longer than to lower a small model.
    """
    from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa

    operators = " ".join(str(node.target) for node in exported.graph.nodes)
    patches = []
    if "upsample" not in operators and "index" not in operators:
        patches.append(Patch(bilinear_2d, "get_graphs_dict", dict))
    if "softmax" not in operators and "attention" not in operators:
        patches.append(Patch(sdpa, "get_graphs", list))
    return patches


def _int8(program: InferenceProgram, calibration: Rows) -> ExportedProgram:
    """Return the program with int8 weights and activations, per channel, by torchao's PT2E flow."""
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
