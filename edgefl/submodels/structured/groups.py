"""Channels as groups of entries: what makes a channel, what belongs to it, and what reads it."""

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
from edgefl.submodels.channels.axes import Atom, Axis, Product, size
from edgefl.submodels.channels.selection import Channels, Selection, indices
from edgefl.submodels.importance.maskable import maskable

Indices = npt.NDArray[np.int64]
Source = Literal["kernel", "norm"]
_NORMS = (nn.modules.batchnorm._NormBase, BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, eq=False)
class Part:
    """Dimension ``dim`` of a state tensor: ``members`` (int64) says of each position whose channel it is, -1 for none."""

    name: str
    dim: int
    members: Indices

    @cached_property
    def positions(self) -> Indices:
        """(channels, positions of each) in the dimension."""
        member_indices = np.flatnonzero(self.members >= 0)
        ordered = member_indices[np.argsort(self.members[member_indices], kind="stable")]
        return ordered.reshape(int(self.members.max()) + 1, -1)

    @property
    def plain(self) -> bool:
        """Whether position and channel are the same number."""
        return bool((self.members == np.arange(self.members.size)).all())


@dataclass(frozen=True, eq=False)
class Group:
    """The channels of one atom, tied ones together.

    ``scored`` is what importance reads: the kernels that make the channel (or its norm scales), by the dimension of
    their outputs. ``own`` are those kernels, biases and norm pairs: what is masked together (R5). ``read`` are the input
    slices of the trained kernels that read the channel. ``moving``: a norm keeps statistics of it. ``exposed``: what reads
    it cannot be gated, being frozen or no kernel at all.
    """

    atom: Atom
    scored: tuple[Part, ...]
    own: tuple[Part, ...]
    read: tuple[Part, ...]
    moving: bool
    exposed: bool = False

    @property
    def gated(self) -> tuple[Part, ...]:
        """Where a dropped channel is taken out of the forward pass: nobody reads it.

        Its own entries are gated too, for products of activations such as attention scores; but not under moving
        statistics, which would otherwise come to describe a channel of zeros. They do where nothing else keeps the
        channel from being read.
        """
        return self.read if self.moving and not self.exposed else self.own + self.read

    def entries(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """n: how many entries the score of one channel reads, of tensors of these ``shapes``."""
        return sum(
            part.positions.shape[1] * math.prod(shapes[part.name]) // shapes[part.name][part.dim]
            for part in self.scored
        )


def groups(
    spec: ModelSpec, channels: Channels, cut: Iterable[Atom], selection: Selection, source: Source
) -> tuple[Group, ...]:
    """The groups of the atoms ``cut``, in the sizes that ``selection`` leaves (none: the whole model's).

    An atom that no kernel of a layer gives out (a user's bare parameter may) is scored by every kernel that holds it, or
    every tensor. ModelError for ``source`` "norm" where an atom has no norm with a scale.
    """
    trained = {name for name, parameter in spec.module.named_parameters() if parameter.requires_grad}
    parameters = dict(spec.module.named_parameters())
    made, outputs, norms = output_dims(spec), _outputs(spec.module), _scales(spec.module)
    all_groups: list[Group] = []
    for atom in cut:
        parts = [
            Part(name, dim, members(channels.axes[name][dim], atom, selection))
            for name, dim in channels.holders[atom]
        ]
        kernels = [part for part in parts if made.get(part.name) == part.dim]
        flat = [part for part in parts if part.name in trained and parameters[part.name].dim() == 1]
        if source == "norm":
            scored = [part for part in parts if part.name in norms]
            if not scored:
                raise ModelError(
                    f"the channels of {parts[0].name!r} pass no norm with a scale that could tell their importance; "
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
        all_groups.append(Group(atom, tuple(scored), tuple(own), tuple(read), moving, exposed))
    return tuple(all_groups)


def members(axis: Axis, atom: Atom, selection: Selection) -> Indices:
    """Of each index of ``axis`` that ``selection`` keeps, which index of ``atom`` it belongs to; -1 for none.

    For a selection of the first indices of ``atom``, as the narrow model has them.
    """
    return _members(axis, atom)[np.asarray(indices(axis, selection), np.int64)]


def _members(axis: Axis, atom: Atom) -> Indices:
    if axis is atom:
        return np.arange(atom.size)
    if isinstance(axis, Atom):
        return np.full(axis.size, -1, np.int64)
    if not isinstance(axis, Product):
        return np.concatenate([_members(part, atom) for part in axis.parts])
    atom_indices = np.full(1, -1, np.int64)
    for factor in axis.factors:
        inner = _members(factor, atom)
        atom_indices = np.maximum(np.repeat(atom_indices, size(factor)), np.tile(inner, atom_indices.size))
    return atom_indices


def output_dims(spec: ModelSpec) -> dict[str, int]:
    """Per trained kernel of a layer, the dimension of its outputs: the second of embeddings and transposed convolutions."""
    kernels = set(maskable(spec))
    return {name: dim for name, dim in _outputs(spec.module).items() if name in kernels}


def _outputs(model: nn.Module) -> dict[str, int]:
    """:func:`output_dims` of every parameter of several dimensions, frozen ones and those of any module too."""
    dims: dict[str, int] = {}
    for path, module in model.named_modules():
        late = isinstance(module, nn.Embedding | nn.EmbeddingBag) or getattr(module, "transposed", False)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                dims[f"{path}.{name}"] = 1 if late else 0
    return dims


def _scales(module: nn.Module) -> set[str]:
    return {
        f"{path}.weight"
        for path, part in module.named_modules()
        if isinstance(part, _NORMS) and getattr(part, "weight", None) is not None
    }
