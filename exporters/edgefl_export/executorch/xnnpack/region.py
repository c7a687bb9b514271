"""Delegates for XNNPACK: regions of nodes, written node by node as a graph of ExecuTorch's XNNPACK backend.

ExecuTorch's partitioner rejects products with weights that are computed or are inputs; XNNPACK itself does not. A
transposition is executed only if an op cannot read its operand transposed, as products can.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import serialize_xnnpack_binary
from executorch.exir._serialize import _dataclass
from torch import Tensor, fx

from edgefl_export.capture.patches import Patch, patched
from edgefl_export.executorch.graph import is_name
from edgefl_export.executorch.xnnpack import axes, pointwise, products
from edgefl_export.executorch.xnnpack.builder import DATATYPES, Builder, Condition, Emitter

# Ops that XNNPACK runs, with what each becomes there, and conditions for nodes of some of them. Types and rank are checked
# before. What is not accepted runs on ExecuTorch's kernels.
EMITTERS: dict[Any, Emitter] = {**axes.EMITTERS, **pointwise.EMITTERS, **products.EMITTERS}
CONDITIONS: dict[Any, Condition] = {**axes.CONDITIONS, **pointwise.CONDITIONS, **products.CONDITIONS}

MAX_RANK = 6
PRODUCT_WORK = 10.0
_CONVERSION = torch.ops.aten._to_copy.default
# The serializer resolves a class's annotations for each field of each node: a CNN's step takes 0.6 s instead of 0.2.
_TYPES = Patch(_dataclass, "get_type_hints", functools.cache(typing.get_type_hints))


@dataclass(frozen=True)
class WrittenDelegate:
    """Delegate: nodes of a graph that XNNPACK runs in one call, written as bytes.

    Attributes:
        inputs: nodes that it reads, in the order of its arguments.
        outputs: nodes that it writes, in the order of the arguments after the inputs.
        data: bytes of the delegate.
        workspace_bytes: predicted size of its workspace.
        values: number of its values.
        reserved: it has one more output, which reserves workspace (:meth:`.builder.Builder.reserve`).
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    data: bytes
    workspace_bytes: int
    values: int
    reserved: bool = False


def supported(node: fx.Node) -> bool:
    """Return True if XNNPACK can run the node: its op is in :data:`EMITTERS`, and it accepts types, rank and arguments."""
    values = [node.meta["val"], *(read.meta["val"] for read in node.all_input_nodes)]
    types = DATATYPES if node.target is _CONVERSION else (torch.float32,)
    return (
        node.target in EMITTERS
        and all(isinstance(value, Tensor) and _fits(value, types) for value in values)
        and (node.target not in CONDITIONS or CONDITIONS[node.target](node))
    )


def _fits(value: Tensor, types: Collection[torch.dtype]) -> bool:
    return value.dtype in types and value.dim() <= MAX_RANK and value.numel() > 0


def costs(node: fx.Node) -> float:
    """Return the work of a node, in passes of an element-wise op over a tensor."""
    return PRODUCT_WORK if node.target in products.PRODUCTS else 1.0


def delegate(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: set[fx.Node], room: int = 0
) -> WrittenDelegate:
    """Return the delegate that runs ``nodes`` on XNNPACK.

    Args:
        module: the graph.
        nodes: nodes of the delegate in the order of execution.
        results: nodes that the graph returns.
        room: least size of the workspace in bytes.

    Returns:
        The delegate. Its outputs are the nodes that are returned or read by other nodes.
    """
    inside = set(nodes)
    builder = Builder(module, inside)
    outputs = [node for node in nodes if _is_read_outside(node, inside, results)]
    for node in nodes:
        if node in outputs:
            builder.output(node)
        EMITTERS[node.target](builder, node)
        if node in outputs:
            builder.write_output(node)
    if room > builder.workspace():
        builder.reserve(room)
    graph, constants = builder.finish(outputs)
    with patched(_TYPES):
        data = serialize_xnnpack_binary(graph, constants)
    return WrittenDelegate(
        tuple(builder.inputs),
        tuple(outputs),
        data,
        builder.workspace(),
        len(builder.values),
        builder.reserved is not None,
    )


def _is_read_outside(node: fx.Node, inside: set[fx.Node], results: set[fx.Node]) -> bool:
    if node in results:
        return True
    for user in node.users:
        if user in inside:
            continue
        if is_name(user):
            if _is_read_outside(user, inside, results):
                return True
        else:
            return True
    return False
