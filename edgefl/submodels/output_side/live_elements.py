"""How many elements are alive at once while a unit runs forward, each value freed after its last use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import copy_module
from edgefl.models.spec import without_values
from edgefl.wire.errors import ModelError


def live_elements(name: str, unit: nn.Module, sample: TensorSpec, batch: int) -> tuple[int, TensorSpec]:
    """(peak live elements of activations for ``batch`` rows, one row of the output) of ``unit`` in inference mode.

    The unit is traced operation by operation on the meta device. Weights are not activations. A view shares its
    base's memory, which lives until the last use of either. The input is alive until its last use.
    """
    bare = copy_module(unit).to("meta").eval()
    x = torch.empty((batch, *sample.shape), dtype=sample.dtype, device="meta")
    with without_values(bare):
        graph = make_fx(bare)(x).graph
    nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    result = output.meta["val"] if isinstance(output, fx.Node) else None
    if not isinstance(result, Tensor):
        raise ModelError(f"unit {name!r} must return one tensor", unit=name)
    return _peak(nodes, output), TensorSpec(tuple(result.shape[1:]), result.dtype)


def _peak(nodes: Sequence[fx.Node], output: fx.Node) -> int:
    order = {node: position for position, node in enumerate(nodes)}
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _source_of_view(node)
        base[node] = base.get(source, node) if source is not None else node
    death = dict.fromkeys(nodes, -1)
    for node in nodes:
        uses = [order[user] for user in node.users if user in order]
        death[base[node]] = max(death[base[node]], order[node], *uses)
    death[base[output]] = len(nodes)
    owners = [node for node in nodes if base[node] is node]
    return max(
        sum(_elements(node) for node in owners if order[node] <= moment <= death[node])
        for moment in range(len(nodes))
    )


def _source_of_view(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one shares, if any: an aliasing operation, or an element of a tuple."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args[0]
    aliases = any(returned.alias_info is not None for returned in schema.returns)
    return node.args[0] if aliases else None


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(item.numel() for item in values if isinstance(item, Tensor))
