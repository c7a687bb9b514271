"""Exact removal of the channels that a mask has emptied (fiarse.md 8.3, R3).

An output channel whose incoming weights are all zero is constant, whatever norms and activations follow it. A channel that
is read with zero weights only is useless. So is a constant one that every reader can fold into its own bias. Tied channels,
such as in residual additions, are removed together or not at all. A layer that is constant altogether is removed, and a
residual branch with it; a tensor to add remains. If a constant cannot be folded exactly (a convolution reads zeros beyond
the borders, which are not constant) the channel stays.

All this is known per operation, on the graph of each unit (:mod:`~edgefl.submodels.compaction.ops`). An unknown operation
needs all its inputs. The result runs in inference only::

    small = compact(spec, weights, submodel.cut_of(weights).masks)
    small.spec.module(x)        # the result of spec.module with the masked weights
    small.report.macs_after
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom
from edgefl.submodels.channels.narrow import narrow
from edgefl.submodels.channels.selection import Channels, Prefer, Selection, indices
from edgefl.submodels.channels.trace import trace_axes
from edgefl.submodels.compaction.constants import KnownValues, as_graphs, find_known_values, unknown_input
from edgefl.submodels.compaction.needs import find_needs, foldable_constants, is_kernel
from edgefl.submodels.compaction.ops import ADDITIONS, groups_of, packet
from edgefl.submodels.cost import macs
from edgefl.submodels.structured.groups import ChannelDim, members, output_dims
from edgefl.wire.tensors import Array, Arrays

# Layers whose output is constant are removed from the graph, with all layers that only they read.


def extract_constants(unit: fx.GraphModule, known: KnownValues) -> fx.GraphModule:
    """Replace constant summands in the graph of ``unit`` by stored tensors, in place, and return the graph.

    The nodes that computed the summands are removed.

    Args:
        unit: Graph of a unit.
        known: Values of its nodes that are equal for every input.
    """
    graph = unit.graph
    for node in list(graph.nodes):
        if node not in known.carried or not known.is_constant(node):
            continue
        users = [user for user in node.users if _is_summand_of(user, node, known)]
        if users:
            unit.register_buffer(f"{node.name}_constant", _shrink(known.of[node]))
            with graph.inserting_before(node):
                constant = graph.get_attr(f"{node.name}_constant")
            for user in users:
                user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    return fx.GraphModule(_targets(unit), graph).eval()


def _is_summand_of(user: fx.Node, node: fx.Node, known: KnownValues) -> bool:
    """Return True if ``user`` adds ``node`` to a value of the same shape that is not constant."""
    if packet(user) not in ADDITIONS or known.is_constant(user):
        return False
    others = [other for other in user.all_input_nodes if other is not node]
    return len(others) == 1 and known.of[others[0]].shape == known.of[node].shape


def _shrink(value: Tensor) -> Tensor:
    """Return ``value`` as float32, reduced to size 1 along each dimension whose entries are all equal, such as the
    batch.
    """
    for dim in range(value.dim()):
        first = value.narrow(dim, 0, 1)
        if bool((value == first).all()):
            value = first
    return value.float().contiguous()


def _targets(unit: fx.GraphModule) -> dict[str, object]:
    """Return the modules and tensors that the graph of ``unit`` reads, by path."""
    targets: dict[str, object] = {}
    for node in unit.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            targets[node.target] = attrgetter(node.target)(unit)
    return targets


# Constants that kernels read are moved into their biases.


def fold_constants(
    name: str,
    made: fx.GraphModule,
    known: KnownValues,
    whole: fx.GraphModule,
    channels: Channels,
    selection: Selection,
) -> None:
    """Fold constants into the biases of kernels, in place, and set the weights that read them to 0.

    A kept channel whose value is constant is folded too: an atom (group of channels) keeps at least one index, whose
    value is wrong afterwards.

    Args:
        name: Name of the unit (stage of the model).
        made: Graph of the narrow unit, changed in place.
        known: Values of the nodes of ``whole`` that are equal for every input.
        whole: Graph of the whole unit.
        channels: Structure of the whole model's dimensions.
        selection: Kept indices of each atom.
    """
    for node, own in zip(list(whole.graph.nodes), list(made.graph.nodes), strict=True):
        if not is_kernel(node, known):
            continue
        constants, weight = foldable_constants(node, known), node.args[1]
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


# Report.


@dataclass(frozen=True)
class LayerChannels:
    """Number of output channels of a kernel before and after compaction. ``after`` 0: the layer was removed."""

    before: int
    after: int

    @property
    def dead(self) -> int:
        return self.before - self.after


@dataclass(frozen=True)
class CompactionReport:
    """Size of a network before and after compaction.

    ``parameters_*`` and ``macs_*`` (of one sample's forward pass) count what a dense runtime stores and executes, zeros
    included.

    Attributes:
        gamma: Share of the masked tensors' entries that the mask keeps.
        layers: Output channels of each kernel, by name.
        parameters_before: Parameters of the masked network.
        parameters_after: Parameters of the compacted network.
        nonzero: Parameters of the masked network that are not 0.
        macs_before: Multiply-accumulates of the masked network.
        macs_after: Multiply-accumulates of the compacted network.
    """

    gamma: float
    layers: Mapping[str, LayerChannels]
    parameters_before: int
    parameters_after: int
    nonzero: int
    macs_before: int
    macs_after: int

    @property
    def dead_channels(self) -> int:
        return sum(layer.dead for layer in self.layers.values())


Masks = Mapping[str, npt.NDArray[np.bool_]]
Used = Mapping[tuple[str, int], Tensor]
Known = Mapping[str, KnownValues]


@dataclass(frozen=True, eq=False)
class CompactedNetwork:
    """Compacted network of the same units (stages of the model), for inference only, with a report.

    Remaining tensors keep their names.
    """

    spec: ModelSpec
    report: CompactionReport

    @property
    def weights(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.spec.weights.items()}


def compact(spec: ModelSpec, weights: Mapping[str, Array], masks: Masks) -> CompactedNetwork:
    """Return the network of ``spec`` with masked ``weights``, without the channels that the masks emptied.

    In inference the output is the same up to rounding. A unit (stage of the model) that cannot be traced is not changed.

    Args:
        spec: Model.
        weights: Weights by global name.
        masks: Masks by global name. Entries where the mask is False become 0. Tensors without a mask are unchanged.

    Raises:
        ModelError: Weights or masks have other names or shapes than the model.
    """
    masked = _mask_weights(spec, weights, masks)
    units = _load_masked(as_graphs(spec), masked)
    graphs = replace(masked, module=units)
    known = _find_values(graphs)
    for name, unit in _graphs(units):
        setattr(units, name, extract_constants(unit, known[name]))
    known = _find_values(graphs)
    made, channels, selection = _narrow_unused(graphs, _find_used(units, known))
    for (name, unit), (_, whole) in zip(_graphs(made), _graphs(units), strict=True):
        fold_constants(name, unit, known[name], whole, channels, selection)
    small = replace(spec, module=made.eval())
    return CompactedNetwork(small, _report(masked, small, masks))


def _mask_weights(spec: ModelSpec, weights: Mapping[str, Array], masks: Masks) -> ModelSpec:
    """Return a copy of ``spec`` in inference mode with ``weights``, set to 0 outside ``masks``.

    Raises:
        ModelError: Weights or masks have other names or shapes than the model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    for what, arrays in (("weights", weights), ("masks", masks)):
        wrong = [name for name, array in arrays.items() if shapes.get(name) != array.shape]
        missing = [name for name in shapes if name not in arrays] if what == "weights" else []
        if wrong or missing:
            name = (wrong + missing)[0]
            raise ModelError(
                f"the {what} of {spec.name} need {name!r} of shape {shapes.get(name)}; found "
                f"{arrays[name].shape if name in arrays else None}",
                name=name,
            )
    module = copy_module(spec.module).eval()
    module.load_state_dict(
        {
            name: torch.from_numpy(np.where(masks.get(name, True), array, 0).astype(array.dtype))
            for name, array in weights.items()
        }
    )
    return replace(spec, module=module)


def _load_masked(units: nn.Sequential, masked: ModelSpec) -> nn.Sequential:
    """Return a copy of ``units`` with the weights of ``masked``. Weights that a unit's graph lacks are ignored."""
    copied = copy_module(units)
    copied.load_state_dict(masked.weights, strict=False)
    return copied


def _graphs(units: nn.Sequential) -> list[tuple[str, fx.GraphModule]]:
    return [(name, unit) for name, unit in units.named_children() if isinstance(unit, fx.GraphModule)]


def _find_values(spec: ModelSpec) -> dict[str, KnownValues]:
    """Return the known values (equal for every input) of each unit (stage of the model) that is a graph, by unit name."""
    unit_values: dict[str, KnownValues] = {}
    x = unknown_input(spec.sample)
    for position, (name, unit) in enumerate(spec.module.named_children()):
        if isinstance(unit, fx.GraphModule):
            unit_values[name] = find_known_values(unit, x)
            x = unit_values[name].result
        else:
            x = unknown_input(spec.boundary(position + 1))
    return unit_values


def _find_used(units: nn.Sequential, known: Known) -> Used:
    """Return the needed positions (bool) of every dimension of a state tensor, by (global name, dimension).

    A unit (stage of the model) that is no graph needs all its input and all its tensors, which are not listed.

    Args:
        units: Units of the model, in order.
        known: Known values of each unit that is a graph, by unit name.
    """
    positions: dict[tuple[str, int], Tensor] = {}
    needed: Tensor | None = None
    for name, unit in reversed(list(units.named_children())):
        if not isinstance(unit, fx.GraphModule):
            needed = None
            continue
        everything = torch.ones(known[name].result.shape, dtype=torch.bool)
        backward = find_needs(unit, known[name], everything if needed is None else needed)
        positions |= {(f"{name}.{own}", dim): used for (own, dim), used in backward.used.items()}
        needed = backward.source
    return positions


# -- channels --------------------------------------------------------------------------------------------------


def _narrow_unused(spec: ModelSpec, used: Used) -> tuple[nn.Sequential, Channels, Selection]:
    """Return (narrow model, dimensions of the whole model, selection) without the channels that ``used`` does not need.

    If no cut works, the model is a copy of the whole one and the selection is empty.
    """
    channels = Channels.of(trace_axes(spec.module, spec.sample))
    ways: tuple[Prefer, ...] = ("inner", "outer")
    for prefer in ways:
        selection = {atom: _kept_indices(channels, atom, used) for atom in channels.cut(prefer)}
        selection = {atom: indices for atom, indices in selection.items() if len(indices) < atom.size}
        if not selection:
            break
        try:
            return narrow(spec, channels, selection), channels, selection
        except ModelError:  # code that holds a size of its own
            continue
    return copy_module(spec.module), channels, {}


def _kept_indices(channels: Channels, atom: Atom, used: Used) -> tuple[int, ...]:
    """Return the needed indices of ``atom`` (group of channels), or (0,) if none is needed."""
    mask = np.zeros(atom.size, np.bool_)
    for name, dim in channels.holders[atom]:
        part = ChannelDim(name, dim, members(channels.axes[name][dim], atom, {}))
        mask |= used[name, dim].numpy()[part.positions].any(1) if (name, dim) in used else True
    return tuple(int(index) for index in np.flatnonzero(mask)) or (0,)


# -- report ----------------------------------------------------------------------------------------------------


def _report(masked: ModelSpec, small: ModelSpec, masks: Masks) -> CompactionReport:
    before, after = dict(masked.module.named_parameters()), dict(small.module.named_parameters())
    dims = output_dims(masked)
    layers = {
        name: LayerChannels(before[name].shape[dim], after[name].shape[dim] if name in after else 0)
        for name, dim in dims.items()
    }
    entries = sum(mask.size for mask in masks.values())
    return CompactionReport(
        gamma=sum(int(mask.sum()) for mask in masks.values()) / entries if entries else 1.0,
        layers=layers,
        parameters_before=sum(tensor.numel() for tensor in before.values()),
        parameters_after=sum(tensor.numel() for tensor in after.values()),
        nonzero=sum(int((tensor != 0).sum()) for tensor in before.values()),
        macs_before=macs(masked.module, masked.sample),
        macs_after=macs(small.module, small.sample),
    )
