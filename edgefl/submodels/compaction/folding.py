"""Kernels take the constants that they read from their biases."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, fx, nn

from edgefl.submodels.channels.selection import Channels, Selection, indices
from edgefl.submodels.compaction.constants import Values
from edgefl.submodels.compaction.needs import foldable, is_kernel
from edgefl.submodels.compaction.ops import groups_of


def fold(
    name: str,
    made: fx.GraphModule,
    known: Values,
    whole: fx.GraphModule,
    channels: Channels,
    selection: Selection,
) -> None:
    """Let the kernels take constants from their biases, in place, and no longer read them.

    Not those of channels that stay either: an atom keeps one index even if nothing is needed of it, whose value is then
    no longer right.
    """
    for node, own in zip(list(whole.graph.nodes), list(made.graph.nodes), strict=True):
        if not is_kernel(node, known):
            continue
        constants, weight = foldable(node, known), node.args[1]
        assert isinstance(weight, fx.Node)
        values = known.of[weight]
        # (outputs, inputs of a group)
        each = constants.reshape(groups_of(node), -1).repeat_interleave(len(values) // groups_of(node), 0)
        added = (values.flatten(2).sum(2) if values.dim() > 2 else values) * each.nan_to_num()
        outputs, inputs = (
            torch.tensor(list(indices(axis, selection)))
            for axis in channels.axes[f"{name}.{weight.target}"][:2]
        )
        left: Tensor = attrgetter(str(weight.target))(made)
        reads = each[outputs][:, inputs].isnan().reshape(*left.shape[:2], *(1 for _ in left.shape[2:]))
        with torch.no_grad():
            left *= reads
        bias = added.sum(1)[outputs]
        if bool((bias != 0).any()):
            _add_bias(made, own, str(weight.target), bias)
    made.recompile()


def _add_bias(unit: fx.GraphModule, node: fx.Node, weight: str, added: Tensor) -> None:
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    path = f"{weight.rpartition('.')[0]}.{node.name}_bias".lstrip(".")
    module = unit.get_submodule(path.rpartition(".")[0])
    if isinstance(bias, fx.Node):
        added = added + attrgetter(str(bias.target))(unit).detach().double()
    module.register_parameter(path.rpartition(".")[2], nn.Parameter(added.float()))
    with unit.graph.inserting_before(node):
        new = unit.graph.get_attr(path)
    if isinstance(bias, fx.Node):
        node.replace_input_with(bias, new)
        if not bias.users:
            unit.graph.erase_node(bias)
            owner = unit.get_submodule(str(bias.target).rpartition(".")[0])
            delattr(owner, str(bias.target).rpartition(".")[2])
    else:
        node.args = (*node.args[:2], new, *node.args[3:])
