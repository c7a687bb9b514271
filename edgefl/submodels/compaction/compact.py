"""Removing the channels that a mask has emptied, exactly (fiarse.md 8.3, R3).

An output channel whose incoming weights are all zero is constant: the same number for every input, whatever norms and
activations come after it. A channel that is read with zero weights only is useless. So is, but for its constant, one that
every reader can take from its own bias instead. Channels that are tied, by residual additions for one, leave together
or stay together. A layer that has become constant altogether leaves whole, and a residual branch with it: what is left
of it is a tensor to add. Where a constant cannot be taken exactly (a convolution reads zeros beyond the borders, which
are no part of it) the channel stays.

All that is known by operation, on the graph of each unit (:mod:`~edgefl.submodels.compaction.ops`); an operation that is
not known needs all that it reads. The outcome runs in inference only::

    small = compact(spec, weights, submodel.cut_of(weights).masks)
    small.spec.module(x)        # what spec.module gives with the masked weights
    small.report.macs_after
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom
from edgefl.submodels.channels.cost import macs
from edgefl.submodels.channels.narrow import narrow
from edgefl.submodels.channels.selection import Channels, Prefer, Selection
from edgefl.submodels.channels.trace import watch
from edgefl.submodels.compaction.branches import without_constants
from edgefl.submodels.compaction.constants import Values, as_graphs, unknown, values
from edgefl.submodels.compaction.folding import fold
from edgefl.submodels.compaction.needs import needs
from edgefl.submodels.compaction.report import CompactionReport, Layer
from edgefl.submodels.structured.groups import Part, members, output_dims
from edgefl.wire.errors import ModelError
from edgefl.wire.tensors import Array, Arrays

Masks = Mapping[str, npt.NDArray[np.bool_]]
Used = Mapping[tuple[str, int], Tensor]
Known = Mapping[str, Values]


@dataclass(frozen=True, eq=False)
class Compacted:
    """A dense network of the same units, in inference, whose tensors keep their names where they are left."""

    spec: ModelSpec
    report: CompactionReport

    @property
    def weights(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.spec.weights.items()}


def compact(spec: ModelSpec, weights: Mapping[str, Array], masks: Masks) -> Compacted:
    """``spec`` with ``weights`` (by global name) and zeros outside ``masks``, without the channels that this emptied.

    In inference the output is the same up to rounding. A unit that cannot be traced stays as it is. Raises ModelError
    for weights or masks of other names or shapes.
    """
    masked = _masked(spec, weights, masks)
    units = _loaded(as_graphs(spec), masked)
    graphs = replace(masked, module=units)
    known = _values(graphs)
    for name, unit in _graphs(units):
        setattr(units, name, without_constants(unit, known[name]))
    known = _values(graphs)
    made, channels, selection = _narrowed(graphs, _used(units, known))
    for (name, unit), (_, whole) in zip(_graphs(made), _graphs(units), strict=True):
        fold(name, unit, known[name], whole, channels, selection)
    small = replace(spec, module=made.eval())
    return Compacted(small, _report(masked, small, masks))


def _masked(spec: ModelSpec, weights: Mapping[str, Array], masks: Masks) -> ModelSpec:
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


def _loaded(units: nn.Sequential, masked: ModelSpec) -> nn.Sequential:
    """A copy with the masked weights; graphs have no state that nothing reads."""
    copied = copy_module(units)
    copied.load_state_dict(masked.weights, strict=False)
    return copied


def _graphs(units: nn.Sequential) -> list[tuple[str, fx.GraphModule]]:
    return [(name, unit) for name, unit in units.named_children() if isinstance(unit, fx.GraphModule)]


def _values(spec: ModelSpec) -> dict[str, Values]:
    unit_values: dict[str, Values] = {}
    x = unknown(spec.sample)
    for position, (name, unit) in enumerate(spec.module.named_children()):
        if isinstance(unit, fx.GraphModule):
            unit_values[name] = values(unit, x)
            x = unit_values[name].result
        else:
            x = unknown(spec.boundary(position + 1))
    return unit_values


def _used(units: nn.Sequential, known: Known) -> Used:
    """Of every dimension of a state tensor, by its global name, the positions that the output needs.

    A unit that is no graph needs all of its own tensors, which are not listed, and of its input.
    """
    positions: dict[tuple[str, int], Tensor] = {}
    needed: Tensor | None = None
    for name, unit in reversed(list(units.named_children())):
        if not isinstance(unit, fx.GraphModule):
            needed = None
            continue
        everything = torch.ones(known[name].result.shape, dtype=torch.bool)
        backward = needs(unit, known[name], everything if needed is None else needed)
        positions |= {(f"{name}.{own}", dim): used for (own, dim), used in backward.used.items()}
        needed = backward.source
    return positions


# -- channels --------------------------------------------------------------------------------------------------


def _narrowed(spec: ModelSpec, used: Used) -> tuple[nn.Sequential, Channels, Selection]:
    channels = Channels.of(watch(spec.module, spec.sample))
    ways: tuple[Prefer, ...] = ("inner", "outer")
    for prefer in ways:
        selection = {atom: _kept(channels, atom, used) for atom in channels.cut(prefer)}
        selection = {atom: indices for atom, indices in selection.items() if len(indices) < atom.size}
        if not selection:
            break
        try:
            return narrow(spec, channels, selection), channels, selection
        except ModelError:  # code that holds a size of its own
            continue
    return copy_module(spec.module), channels, {}


def _kept(channels: Channels, atom: Atom, used: Used) -> tuple[int, ...]:
    """The indices of which something is needed, one at least."""
    mask = np.zeros(atom.size, np.bool_)
    for name, dim in channels.holders[atom]:
        part = Part(name, dim, members(channels.axes[name][dim], atom, {}))
        mask |= used[name, dim].numpy()[part.positions].any(1) if (name, dim) in used else True
    return tuple(int(index) for index in np.flatnonzero(mask)) or (0,)


# -- report ----------------------------------------------------------------------------------------------------


def _report(masked: ModelSpec, small: ModelSpec, masks: Masks) -> CompactionReport:
    before, after = dict(masked.module.named_parameters()), dict(small.module.named_parameters())
    dims = output_dims(masked)
    layers = {
        name: Layer(before[name].shape[dim], after[name].shape[dim] if name in after else 0)
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
