"""Selection of indices of atoms, and the resulting parts of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from edgefl.submodels.channels.axes import Atom, Axes, Axis, ProductAxis, atoms, is_pinned, resolve, size
from edgefl.submodels.channels.trace import Place, TracedAxes
from edgefl.wire.regions import BlockRegion, Region

Indices: TypeAlias = range | tuple[int, ...]
Selection: TypeAlias = Mapping[Atom, Indices]
"""Kept indices of atoms, in local order. An atom without an entry is kept whole."""
Prefer = Literal["inner", "always_inner", "outer", "neither"]
"""Factor of a product that is cut, see :meth:`Channels.cut`."""


@dataclass(frozen=True, eq=False)
class Channels:
    """Structure of the dimensions of a model's state tensors, as a trace found it.

    An axis describes one dimension. It consists of atoms: groups of indices that are cut as one, such as the channels
    of a layer.

    Attributes:
        axes: Axes of each state tensor, by name.
        places: Axes of the results of operations in units (stages of the model) that are graphs, by (path of the
            graph, position).
        is_loose: True if a size that the code gives to a tensor must follow a cut.
    """

    axes: Mapping[str, Axes]
    places: Mapping[Place, Axes]
    is_loose: bool

    @classmethod
    def of(cls, watched: TracedAxes) -> Channels:
        """Return the structure that a traced run has found, with all later refinements applied."""
        axes = {name: tuple(map(resolve, own)) for name, own in watched.axes.items()}
        places = {place: tuple(map(resolve, own)) for place, own in watched.places.items()}
        loose = {atom for axis in watched.loose for atom in atoms(axis) if atom.reason is None}
        state_atoms = {atom for own in axes.values() for axis in own for atom in atoms(axis)}
        return cls(axes, places, not loose.isdisjoint(state_atoms))

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """Atoms (groups of indices) that can be cut, in the order in which the state tensors contain them."""
        every = (atom for axes in self.axes.values() for axis in axes for atom in atoms(axis))
        return tuple(dict.fromkeys(atom for atom in every if atom.reason is None))

    @cached_property
    def holders(self) -> Mapping[Atom, tuple[tuple[str, int], ...]]:
        """Dimensions that contain each atom (group of indices that is cut as one) that can be cut, as tuples (tensor
        name, dimension), by atom.
        """
        occurrences: dict[Atom, list[tuple[str, int]]] = {atom: [] for atom in self.atoms}
        for name, axes in self.axes.items():
            for dim, axis in enumerate(axes):
                for atom in dict.fromkeys(atoms(axis)):
                    if atom.reason is None:
                        occurrences[atom].append((name, dim))
        return {atom: tuple(where) for atom, where in occurrences.items()}

    @cached_property
    def runs(self) -> tuple[tuple[Atom, ...], ...]:
        """Groups of atoms that are multiplied in one dimension of a state tensor, such as (heads, entries per head).

        An atom is a group of indices that is cut as one. Each group is ordered outermost first, and lists only atoms
        that can be cut. At most one of them is cut.
        """
        all_runs = (run for axes in self.axes.values() for axis in axes for run in _runs(axis))
        return tuple(dict.fromkeys(all_runs))

    def cut(self, prefer: Prefer = "inner") -> tuple[Atom, ...]:
        """Return the atoms (groups of indices) to cut. Each dimension is cut at most once.

        Args:
            prefer: Atom to cut in a product of atoms, such as heads times entries per head: the "inner" or
                "outer" one, or "neither". No atom of the product is cut if one of them is a dimension elsewhere
                or is cut in another product. "always_inner" cuts the inner one nevertheless, and leaves such a
                dimension (a bias per head) whole.
        """
        several = [run for run in self.runs if len(run) > 1]
        alone = {run[0] for run in self.runs if len(run) == 1}
        chosen = set() if prefer == "always_inner" else set(alone)
        for run in several:
            if prefer != "neither" and chosen.isdisjoint(run):
                chosen.add(run[0 if prefer == "outer" else -1])
        chosen |= alone.difference(*several)
        return tuple(atom for atom in self.atoms if atom in chosen)

    def why_whole(self, name: str) -> str:
        """Return the reasons why each dimension of tensor ``name`` is kept whole, as text, or "" if one can be cut."""
        axes = self.axes[name]
        if not all(map(is_pinned, axes)):
            return ""
        reasons = [
            f"dimension {dim} of size {size(axis)} because of {atom.reason}"
            for dim, axis in enumerate(axes)
            if (atom := next(atoms(axis), None)) is not None
        ]
        return ", ".join(reasons) or "it has a single entry"


def _runs(axis: Axis) -> list[tuple[Atom, ...]]:
    """Return the atoms (groups of indices that are cut as one) that can be cut in each product of ``axis``, outermost
    first in each tuple.
    """
    if isinstance(axis, Atom):
        return [(axis,)] if axis.reason is None else []
    if isinstance(axis, ProductAxis):
        run = tuple(f for f in axis.factors if isinstance(f, Atom) and f.reason is None)
        inner = [each for f in axis.factors if not isinstance(f, Atom) for each in _runs(f)]
        return [run + each for each in inner] or ([run] if run else [])
    return [each for part in axis.parts for each in _runs(part)]


def kept(axis: Axis, selection: Selection) -> int:
    """Return the number of indices of ``axis`` that the selection keeps.

    An atom (group of indices that is cut as one) without an entry is kept whole.
    """
    if isinstance(axis, Atom):
        return len(selection[axis]) if axis in selection else axis.size
    members = [
        kept(inner, selection) for inner in (axis.factors if isinstance(axis, ProductAxis) else axis.parts)
    ]
    return math.prod(members) if isinstance(axis, ProductAxis) else sum(members)


def indices(axis: Axis, selection: Selection) -> Indices:
    """Return the kept indices of ``axis``, counted in the whole model, in the order of the narrow model."""
    if isinstance(axis, Atom):
        return selection.get(axis, range(axis.size))
    if not any(atom in selection for atom in atoms(axis)):
        return range(size(axis))
    if isinstance(axis, ProductAxis):
        flat_indices: Indices = range(1)
        for factor in axis.factors:
            step, own = size(factor), indices(factor, selection)
            flat_indices = tuple(outer * step + inner for outer in flat_indices for inner in own)
        return flat_indices
    starts = [0, *accumulate(map(size, axis.parts))]
    return tuple(
        start + index
        for start, part in zip(starts, axis.parts, strict=False)
        for index in indices(part, selection)
    )


def regions(channels: Channels, selection: Selection) -> dict[str, Region]:
    """Return the region (kept entries) of every state tensor, by name. None: the whole tensor, in order.

    Args:
        channels: Structure of the model's dimensions.
        selection: Kept indices of each atom (group of indices that is cut as one).
    """
    parts: dict[str, Region] = {}
    for name, axes in channels.axes.items():
        block_axes = tuple(_as_range(indices(axis, selection), size(axis)) for axis in axes)
        parts[name] = None if all(own is None for own in block_axes) else BlockRegion(block_axes)
    return parts


def _as_range(held: Indices, whole: int) -> Indices | None:
    """Return ``held`` as a range if it is consecutive, and None if it is all of ``whole`` indices."""
    first = held[0]
    if tuple(held) != tuple(range(first, first + len(held))):
        return tuple(held)
    return None if len(held) == whole else range(first, first + len(held))


def counts(
    channels: Channels, keep: Callable[[int], int], prefer: Prefer = "inner", *, tied: bool = False
) -> dict[Atom, int]:
    """Return the number of kept indices of each atom (group of indices) that is cut.

    Args:
        channels: Structure of the model's dimensions.
        keep: Function from the size of an atom to the number of indices to keep.
        prefer: Atom of a product that is cut, see :meth:`Channels.cut`.
        tied: True: an atom of the same size as a product with a cut atom keeps as many indices as that product.
            Code that uses the width of attention as the width of its input requires this.
    """
    kept_counts = {atom: keep(atom.size) for atom in channels.cut(prefer)}
    if tied:
        wholes = {
            math.prod(atom.size for atom in run): math.prod(kept_counts.get(atom, atom.size) for atom in run)
            for run in channels.runs
            if len(run) > 1
        }
        members = {atom for run in channels.runs if len(run) > 1 for atom in run}
        kept_counts |= {
            atom: wholes[atom.size] for atom in kept_counts if atom.size in wholes and atom not in members
        }
    return kept_counts


def leading(counted: Mapping[Atom, int]) -> Selection:
    """Return the selection of the first ``counted[atom]`` indices of each atom (group of indices).

    Atoms that keep all indices are left out, which means that they are kept whole.
    """
    return {atom: range(number) for atom, number in counted.items() if number < atom.size}


def rolling(counted: Mapping[Atom, int], start: int) -> Selection:
    """Return FedRolex's window of each atom: the indices ``(start + q) mod size``, q = 0 .. ``counted[atom]`` - 1.

    Atoms that keep all indices are left out, which means that they are kept whole.

    Args:
        counted: Number of kept indices by atom (group of indices).
        start: First index of the window.
    """
    return {
        atom: tuple((start + offset) % atom.size for offset in range(number))
        for atom, number in counted.items()
        if number < atom.size
    }


def count_elements(channels: Channels, selection: Selection, names: Sequence[str] | None = None) -> int:
    """Return the number of entries that a selection keeps of the state tensors ``names``. None: of all state tensors."""
    return sum(
        math.prod(kept(axis, selection) for axis in channels.axes[name])
        for name in (channels.axes if names is None else names)
    )
