"""A region of nodes as a graph for ExecuTorch's XNNPACK delegate, written node by node.

The stock partitioner refuses products with weights that are computed or given; XNNPACK itself does not. A permutation is
not run until something reads it as it is: products read transposed operands.
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
class Region:
    """Arguments of the delegate in order, its bytes, its own memory, its values.

    ``reserved``: behind the outputs it writes a single number without readers (:meth:`.builder.Builder.reserve`).
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    data: bytes
    workspace_bytes: int
    values: int
    reserved: bool = False


def supported(node: fx.Node) -> bool:
    """Return True if XNNPACK can run the node: an op of the table, of types that it takes, static shapes of few axes."""
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
    """Work of a node in element-wise passes: what decides whether a region is worth a call."""
    return PRODUCT_WORK if node.target in products.PRODUCTS else 1.0


def delegate(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: set[fx.Node], room: int = 0
) -> Region:
    """``nodes`` (in order of execution) as one delegate; what others read of them is written out. The workspace has at
    least ``room`` bytes."""
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
    return Region(
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
