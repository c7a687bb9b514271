"""Deployed models as weights in .safetensors with a loader of a few lines of torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.export.graph_signature import InputKind

from edgefl.errors import ExportError
from edgefl.system.distribution import version
from edgefl.wire.tensors import Array
from edgefl_export.deploy.program import OUTPUT, InferenceProgram
from edgefl_export.deploy.target import DeployTarget

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
    """Weights and loader before the metadata are known."""

    def __init__(self, program: InferenceProgram, target: DeployTarget, names: Mapping[str, str]) -> None:
        """Collect the weights that the model reads.

        Args:
            program: the model.
            target: with ``float16``, weights are stored so, and the loader converts them to float32.
            names: names of the user's module for tensors of the model; others keep their own.

        Raises:
            ExportError: if the program has parts that are no plain operators.
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
        """The runtime that the loader needs."""
        return {"name": "torch", "least": ".".join(torch.__version__.split(".")[:2])}

    def model(self, metadata: Mapping[str, Any]) -> bytes:
        """Return the weights with ``metadata``: an entry for each key, texts as they are and others in JSON."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()
        }
        return bytes(save(self._weights, metadata=texts))


class TorchModel:
    """Weights run by their loader."""

    def __init__(self, model: bytes, loader: str, inputs: tuple[str, ...]) -> None:
        space: dict[str, Any] = {"__file__": "model.py", "__name__": "loader"}
        exec(compile(loader, "<loader>", "exec"), space)
        space["load_file"] = lambda _path: load(model)
        self._call, self.inputs = space["load"](), inputs

    def __call__(self, rows: Mapping[str, Array]) -> Array:
        """Return the output for rows by the names of the inputs."""
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
