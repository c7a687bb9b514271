"""A model's forward pass as a list of calls for a process with JAX and without torch.

:func:`prepare` runs in our environment, where torch is, and writes ``forward.json`` and ``forward.npz``;
:mod:`benchmarks.train_step.jax_training` reads them where JAX is. Networks of the layers in :data:`OPS` are translated,
others refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, InputKind

from benchmarks.torch_layers import to_torch_layers
from benchmarks.train_step.eager import has_plain_labels
from edgefl.errors import ExportError
from edgefl.submodels.output_side.submodel import OutputSide

OPS = frozenset({
    *("conv2d.default", "linear.default", "batch_norm.default", "max_pool2d.default", "mean.dim", "add.Tensor"),
    *("relu.default", "relu6.default", "flatten.using_ints"),
})  # fmt: skip
"""ATen operators with a translation in :mod:`benchmarks.train_step.jax_training`."""
_COUNTER = "num_batches_tracked"


def prepare(folder: Path, submodel: OutputSide, batch: int) -> None:
    """Write the calls of the forward pass in training, and the values of parameters and statistics.

    Raises ExportError for a model with other layers or another loss than plain cross entropy.
    """
    if not has_plain_labels(submodel):
        raise ExportError("only plain cross entropy with one label per sample is compared with JAX")
    module = to_torch_layers(submodel.suffix)
    algorithm = torch.export.export(module, (submodel.boundary.rows(batch).zeros(),), strict=False)
    names = _inputs(algorithm.graph_signature)
    calls = [
        _call(node, names)
        for node in algorithm.graph.nodes
        if node.op == "call_function" and not _counts(node, names)
    ]
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    output = algorithm.graph_signature.user_outputs[0]
    (folder / "forward.json").write_text(json.dumps({"calls": calls, "trained": trained, "output": output}))
    values = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    np.savez(folder / "forward.npz", **values)


def _inputs(signature: ExportGraphSignature) -> dict[str, str]:
    """Return names of parameters and statistics, or ``x``, by the name of their placeholder."""
    return {
        str(spec.arg.name): "x" if spec.kind == InputKind.USER_INPUT else str(spec.target)
        for spec in signature.input_specs
    }


def _counts(node: fx.Node, names: dict[str, str]) -> bool:
    """Return True for the counter of batches, which nothing reads."""
    first = node.args[0]
    return isinstance(first, fx.Node) and names.get(first.name, "").endswith(_COUNTER)


def _call(node: fx.Node, names: dict[str, str]) -> dict[str, Any]:
    """Return ``{"name": ..., "op": ..., "arguments": {...}}``; a tensor argument is ``{"tensor": NAME}``."""
    assert isinstance(node.target, torch._ops.OpOverload)
    op = str(node.target).removeprefix("aten.")
    if op not in OPS:
        raise ExportError(
            f"{node.target} is not translated to JAX; these are: {', '.join(sorted(OPS))}", op=op
        )
    schema = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | node.kwargs
    arguments = {
        argument.name: _plain(given.get(argument.name, argument.default_value), names) for argument in schema
    }
    return {"name": node.name, "op": op, "arguments": arguments}


def _plain(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, fx.Node):
        return {"tensor": names.get(value.name, value.name)}
    if isinstance(value, list | tuple):
        return [_plain(each, names) for each in value]
    return value
