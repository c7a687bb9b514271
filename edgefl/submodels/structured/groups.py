"""Channels as groups of entries: the entries that compute a channel, scale it, and read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from edgefl.errors import ModelError
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom, Axis, ProductAxis, size
from edgefl.submodels.channels.selection import Channels, Selection, indices
from edgefl.submodels.importance.strategy import maskable

Indices = npt.NDArray[np.int64]
Source = Literal["kernel", "norm"]
_NORMS = (nn.modules.batchnorm._NormBase, BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, eq=False)
class ChannelDim:
    """Dimension of a state tensor that holds channels of one group.

    Attributes:
        name: Name of the tensor.
        dim: Dimension.
        members: Channel of each position in the dimension, int64; -1: none.
    """

    name: str
    dim: int
    members: Indices

    @cached_property
    def positions(self) -> Indices:
        """Positions of each channel in the dimension, int64 (channels, positions per channel)."""
        member_indices = np.flatnonzero(self.members >= 0)
        ordered = member_indices[np.argsort(self.members[member_indices], kind="stable")]
        return ordered.reshape(int(self.members.max()) + 1, -1)

    @property
    def plain(self) -> bool:
        """True if position i of the dimension is channel i, for all positions."""
        return bool((self.members == np.arange(self.members.size)).all())


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Channels of one atom (group of indices that is cut as one). Channel c of all its tensors is kept or dropped
    together.

    Attributes:
        atom: The atom.
        scored: Tensors that importance reads: the kernels that compute the channel, by output dimension, or its
            norm scales.
        own: Kernels, biases and norm pairs of the channel, which are masked together (R5).
        read: Input slices of the trained kernels that read the channel.
        moving: True if a norm keeps moving statistics of the channel.
        exposed: True if its readers cannot be gated, because they are frozen or no kernels.
    """

    atom: Atom
    scored: tuple[ChannelDim, ...]
    own: tuple[ChannelDim, ...]
    read: tuple[ChannelDim, ...]
    moving: bool
    exposed: bool = False

    @property
    def gated(self) -> tuple[ChannelDim, ...]:
        """Dimensions of the tensors in which the entries of a dropped channel become 0 in the forward pass.

        They are the input slices that read the channel, and the group's own tensors. The latter are left out if a norm
        keeps moving statistics of the channel and its readers can be gated. The statistics would otherwise describe a
        channel of zeros.
        """
        return self.read if self.moving and not self.exposed else self.own + self.read

    def entries(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return n, the number of entries that the score of one channel reads. ``shapes`` has the shape of each tensor."""
        return sum(
            part.positions.shape[1] * math.prod(shapes[part.name]) // shapes[part.name][part.dim]
            for part in self.scored
        )


def channel_groups(
    spec: ModelSpec, channels: Channels, cut: Iterable[Atom], selection: Selection, source: Source
) -> tuple[ChannelGroup, ...]:
    """Return the channel groups of the atoms ``cut`` (groups of indices that are cut as one), in their order.

    An atom that no kernel of a layer outputs (but a user's bare parameter) is scored by every kernel that holds it,
    or every tensor.

    Args:
        spec: Model.
        channels: Structure of its dimensions.
        cut: Atoms to cut.
        selection: Kept indices of each atom, which give the sizes. Empty: sizes of the whole model.
        source: Tensors that importance reads: "kernel" or "norm".

    Raises:
        ModelError: ``source`` is "norm", and an atom has no norm with a scale.
    """
    trained = {name for name, parameter in spec.module.named_parameters() if parameter.requires_grad}
    parameters = dict(spec.module.named_parameters())
    made, outputs, norms = output_dims(spec), _outputs(spec.module), _scales(spec.module)
    all_groups: list[ChannelGroup] = []
    for atom in cut:
        parts = [
            ChannelDim(name, dim, members(channels.axes[name][dim], atom, selection))
            for name, dim in channels.holders[atom]
        ]
        kernels = [part for part in parts if made.get(part.name) == part.dim]
        flat = [part for part in parts if part.name in trained and parameters[part.name].dim() == 1]
        if source == "norm":
            scored = [part for part in parts if part.name in norms]
            if not scored:
                raise ModelError(
                    f"the channels of {parts[0].name!r} pass no norm whose scale gives their importance; "
                    'use score = "kernel"',
                    tensor=parts[0].name,
                )
        else:
            wide = [part for part in parts if part.name in parameters and parameters[part.name].dim() > 1]
            scored = kernels or wide or [part for part in parts if part.name in parameters]
        own = list({id(part): part for part in (*kernels, *flat, *scored)}.values())
        read = [part for part in parts if part.name in trained and part not in own]
        still = [part for part in parts if part.name in parameters and part.name not in trained]
        exposed = not read or any(part.dim != outputs.get(part.name, part.dim) for part in still)
        moving = any(part.name not in parameters for part in parts)
        all_groups.append(ChannelGroup(atom, tuple(scored), tuple(own), tuple(read), moving, exposed))
    return tuple(all_groups)


def members(axis: Axis, atom: Atom, selection: Selection) -> Indices:
    """Return the index within ``atom`` of each index of ``axis`` that ``selection`` keeps, int64; -1 if it is of another
    atom (group of indices that is cut as one).

    ``selection`` must hold the first indices of ``atom``, as in the narrow model.
    """
    return _members(axis, atom)[np.asarray(indices(axis, selection), np.int64)]


def _members(axis: Axis, atom: Atom) -> Indices:
    if axis is atom:
        return np.arange(atom.size)
    if isinstance(axis, Atom):
        return np.full(axis.size, -1, np.int64)
    if not isinstance(axis, ProductAxis):
        return np.concatenate([_members(part, atom) for part in axis.parts])
    atom_indices = np.full(1, -1, np.int64)
    for factor in axis.factors:
        inner = _members(factor, atom)
        atom_indices = np.maximum(np.repeat(atom_indices, size(factor)), np.tile(inner, atom_indices.size))
    return atom_indices


def output_dims(spec: ModelSpec) -> dict[str, int]:
    """Return the output dimension of each trained kernel, by name: 1 for embeddings and transposed convolutions, else 0."""
    kernels = set(maskable(spec))
    return {name: dim for name, dim in _outputs(spec.module).items() if name in kernels}


def _outputs(model: nn.Module) -> dict[str, int]:
    """Return the output dimension of every parameter of several dimensions, by name, including frozen ones."""
    dims: dict[str, int] = {}
    for path, module in model.named_modules():
        late = isinstance(module, nn.Embedding | nn.EmbeddingBag) or getattr(module, "transposed", False)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                dims[f"{path}.{name}"] = 1 if late else 0
    return dims


def _scales(module: nn.Module) -> set[str]:
    """Return the names of the scales of all norms."""
    return {
        f"{path}.weight"
        for path, part in module.named_modules()
        if isinstance(part, _NORMS) and getattr(part, "weight", None) is not None
    }
