"""Cheaper forms of gradients, while a graph is forward, backward and update in torch's own ops."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch
from torch import fx

from edgefl_export.capture.checks import is_written_to
from edgefl_export.capture.nodes import argument, fake_value, node_argument
from edgefl_export.decompositions.normalization import GRADIENT

_aten = torch.ops.aten
_POOLING = _aten.max_pool2d_with_indices.default
_FACTORS = {
    _aten.threshold_backward.default: 1,
    _aten.tanh_backward.default: 1,
    _aten.sigmoid_backward.default: 1,
}
"""Gradients of ops by entry that are dL/dy times a factor of what the op gives: the place of that argument."""


def rewrite_gradients(joint: fx.GraphModule, table: Collection[object]) -> None:
    """Rewrite each gradient below into its cheapest form, with the same result but for rounding.

    ``table``: ops that have a rule. Without a rule, a norm's gradient stays torch's own.
    """
    for node in list(joint.graph.nodes):
        if node.target is _aten.max_pool2d_with_indices_backward.default:
            _of_maximum(node)
        elif node.target is _aten.native_batch_norm_backward.default and GRADIENT in table:
            _of_norm(joint.graph, node)
    joint.recompile()


def _of_maximum(node: fx.Node) -> None:
    """Give the gradient of a maximum the pooled tensor, and apply an activation's gradient before it.

    The factor of an activation at a maximum is that of the maximum, so the pooled values decide instead of its input, which
    has some four times as many entries. Autograd does not keep the pooled values, so a model may write to them; then nothing
    is changed.

    torch reads the shape of that argument only, and where a gradient is differentiated it passes a tangent there. A rule
    that finds the maxima again, without positions, must read the tensor itself.
    """
    positions = argument(node, "indices")
    pooling = positions.args[0] if positions.target is operator.getitem else positions
    if pooling.target is not _POOLING:
        return
    pooled = pooling.args[0]
    node.update_arg(1, pooled)
    best = next(_parts(pooling, 0), None)
    if best is None or len(node.users) != 1 or is_written_to(best):
        return
    (reader,) = node.users
    for target, place in _FACTORS.items():
        own = reader.target is target and reader.args[0] is node
        if own and _value(node_argument(reader, place)) is _value(pooled):
            with node.graph.inserting_before(node):
                arguments = (node.args[0], best, *reader.args[2:])
                first = node.graph.call_function(target, arguments, reader.kwargs)
            node.update_arg(0, first)
            reader.replace_all_uses_with(node)
            node.graph.erase_node(reader)
            return


def _of_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Move the gain of a norm into the kernel of the convolution before it, if the kernel has fewer entries than the images.

    dL/dx = gain h * w = h * (gain w);  dL/dw = gain dL/dw of h;  dL/db = gain dL/db of h.
    """
    gradients = list(_parts(node, 0))
    if len(gradients) != 1 or len(gradients[0].users) != 1:
        return
    (reader,) = gradients[0].users
    if reader.target is not _aten.convolution_backward.default or reader.args[0] is not gradients[0]:
        return
    kernel = argument(reader, "weight")
    if argument(reader, "transposed") or 2 * fake_value(kernel).numel() > fake_value(gradients[0]).numel():
        return
    with graph.inserting_before(node):
        parts = graph.call_function(GRADIENT, (*node.args[:9],))
        before, gain, slope, level = (graph.call_function(operator.getitem, (parts, at)) for at in range(4))
        scale = graph.call_function(_aten.view.default, (gain, [-1, *[1] * (fake_value(kernel).dim() - 1)]))
    with graph.inserting_before(reader):
        scaled = graph.call_function(_aten.mul.Tensor, (kernel, scale))
    reader.update_arg(2, scaled)
    for at, factor in ((1, scale), (2, gain)):
        for each in list(_parts(reader, at)):
            users = list(each.users)
            if users:  # unused gradients are not computed
                with graph.inserting_after(each):
                    product = graph.call_function(_aten.mul.Tensor, (each, factor))
                for user in users:
                    user.replace_input_with(each, product)
    for at, part in ((0, before), (1, slope), (2, level)):
        for each in list(_parts(node, at)):
            each.replace_all_uses_with(part)
            graph.erase_node(each)
    graph.erase_node(node)


def _value(node: fx.Node) -> fx.Node:
    """Return the value behind ``detach``."""
    while node.target in (_aten.detach.default, _aten.alias.default):
        node = node_argument(node, 0)
    return node


def _parts(node: fx.Node, at: int) -> Iterator[fx.Node]:
    """Return the nodes that take result ``at`` out of a node with several results."""
    return (user for user in node.users if user.target is operator.getitem and user.args[1] == at)
