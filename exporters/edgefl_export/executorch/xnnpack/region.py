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
from edgefl_export.executorch.graph import base_of, is_name
from edgefl_export.executorch.xnnpack import axes, pointwise, products
from edgefl_export.executorch.xnnpack.builder import Builder, Emitter, TensorValue

# Which ops XNNPACK runs, and what each becomes there. An emitter says whether it accepts a node (the dtype and the rank
# are checked before) and writes it; what it does not accept runs on ExecuTorch's kernels.
EMITTERS: dict[Any, Emitter] = {
    **axes.EMITTERS,
    **pointwise.EMITTERS,
    **products.EMITTERS,
}


MAX_RANK = 6
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
    emitter = EMITTERS.get(node.target)
    if emitter is None:
        return False
    values = [node.meta["val"], *(read.meta["val"] for read in node.all_input_nodes)]
    if not all(isinstance(value, Tensor) and _fits(value, emitter.types) for value in values):
        return False
    return emitter.accepts(node)


def _fits(value: Tensor, types: Collection[torch.dtype]) -> bool:
    return value.dtype in types and value.dim() <= MAX_RANK and value.numel() > 0


def costs(node: fx.Node) -> float:
    """Work of a node in element-wise passes: what decides whether a region is worth a call."""
    return EMITTERS[node.target].work


def delegate(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: set[fx.Node], room: int = 0
) -> Region:
    """``nodes`` (in order of execution) as one delegate; what others read of them is written out. The workspace has at
    least ``room`` bytes."""
    inside = set(nodes)
    builder = Builder()
    inputs: list[fx.Node] = []
    outputs = [node for node in nodes if _is_read_outside(node, inside, results)]

    def value_of(node: fx.Node) -> TensorValue:
        known = builder.known(node)
        if known is not None:
            return known
        base = base_of(node)
        if base in inside:
            return builder.viewed(node, base)
        if base.op == "get_attr":
            return builder.constant(node, getattr(module, str(base.target)).reshape(node.meta["val"].shape))
        inputs.append(node)
        return builder.external_input(node, len(inputs) - 1)

    builder.resolve = value_of
    for node in nodes:
        if node in outputs:
            builder.output(node)
        EMITTERS[node.target].emit(builder, node)
        if node in outputs:
            builder.write_output(node)
    if room > builder.workspace():
        builder.reserve(room)
    graph, constants = builder.finish(len(inputs), outputs)
    with patched(_TYPES):
        data = serialize_xnnpack_binary(graph, constants)
    return Region(
        tuple(inputs),
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
