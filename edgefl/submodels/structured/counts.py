"""How many channels of each layer a tier holds: one threshold over all channels, such that the slice meets gamma (R5)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom
from edgefl.submodels.channels.narrow import narrow
from edgefl.submodels.channels.selection import Channels, Prefer, elements, leading
from edgefl.submodels.cost import macs
from edgefl.submodels.structured.scores import Values

Budget = Literal["parameters", "macs"]
Counts = Mapping[Atom, int]
_WAYS: tuple[tuple[Prefer, bool], ...] = (
    ("inner", False),
    ("inner", True),
    ("outer", False),
    ("outer", True),
    ("neither", False),
)


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to cut a model: the atoms whose channels compete, and atoms that follow products of others.

    An atom of :attr:`followers` keeps as many indices as its product of free atoms does, for code that takes the width
    of attention for the width of its input.
    """

    channels: Channels
    cut: tuple[Atom, ...]
    followers: Mapping[Atom, tuple[Atom, ...]]

    @cached_property
    def free(self) -> tuple[Atom, ...]:
        """The atoms whose channels compete."""
        return tuple(atom for atom in self.cut if atom not in self.followers)

    def counts(self, numbers: Sequence[int]) -> dict[Atom, int]:
        """Channels of every cut atom, from those of the free ones."""
        atom_counts = dict(zip(self.free, numbers, strict=True))
        for atom, run in self.followers.items():
            atom_counts[atom] = math.prod(atom_counts.get(inner, inner.size) for inner in run)
        return {atom: atom_counts[atom] for atom in self.cut}


def layouts(channels: Channels) -> Iterator[Layout]:
    """The ways to cut, the preferred one first; which of them the model's own code can follow, a run of it tells."""
    seen: list[tuple[tuple[Atom, ...], Mapping[Atom, tuple[Atom, ...]]]] = []
    for prefer, tied in _WAYS:
        cut = channels.cut(prefer)
        followers = _followers(channels, cut) if tied else {}
        if cut and (cut, followers) not in seen:
            seen.append((cut, followers))
            yield Layout(channels, cut, followers)


def _followers(channels: Channels, cut: Sequence[Atom]) -> dict[Atom, tuple[Atom, ...]]:
    """Per cut atom that is as large as some product, that product; and products of that size keep as much as each other."""
    runs = [run for run in channels.runs if len(run) > 1]
    inside = {atom for run in runs for atom in run}
    followers: dict[Atom, tuple[Atom, ...]] = {}
    for atom in cut:
        alike = [run for run in runs if math.prod(inner.size for inner in run) == atom.size]
        if atom in inside or not alike:
            continue
        followers[atom] = alike[0]
        leaders = [inner for inner in alike[0] if inner in cut]
        others = (inner for run in alike[1:] for inner in run if inner in cut and inner not in leaders)
        followers |= {other: (leader,) for other in others for leader in leaders if leader.size == other.size}
    return followers


def cost_of(spec: ModelSpec, channels: Channels, budget: Budget) -> Callable[[Counts], int]:
    """The true cost of the slice that counts leave: its parameters, or the MACs of a sample's forward pass."""
    names = [name for name, _ in spec.module.named_parameters()]

    def parameters(counted: Counts) -> int:
        return elements(channels, leading(counted), names)

    def multiplications(counted: Counts) -> int:
        return macs(narrow(spec, channels, leading(counted)), spec.sample)

    return parameters if budget == "parameters" else multiplications


def staying(spec: ModelSpec, channels: Channels) -> dict[str, str]:
    """Why the parameters that nothing can be left out of stay whole, the largest first.

    Those below a hundredth of the model, such as the biases of the classes, are left out.
    """
    sizes = {name: parameter.numel() for name, parameter in spec.module.named_parameters()}
    least = sum(sizes.values()) / 100
    large = (name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= least)
    return {
        name: f"{sizes[name]} entries: {reason}" for name in large if (reason := channels.why_whole(name))
    }


def search(
    layout: Layout, ranked: Sequence[Values], cost: Callable[[Counts], int], most: float
) -> tuple[int, ...]:
    """Channels of each free atom: as many of the ranking as cost at most ``most``, at least one of each atom.

    ``ranked`` holds the channels' importance per free atom. The highest are taken, ties by lowest atom and index, and
    the search ends at the first that does not fit: the outcome is one threshold, and is nested in ``most``. Costs
    interact, and grow with every channel, so that the number of channels can be found by bisection.

    Raises ModelError, with ``smallest``, if one channel of each atom costs more.
    """
    owners = np.repeat(np.arange(len(ranked)), [values.size for values in ranked])
    order = owners[np.argsort(-np.concatenate(ranked), kind="stable")]

    def first(number: int) -> tuple[int, ...]:
        counts = np.bincount(order[:number], minlength=len(ranked))
        return tuple(int(count) for count in np.maximum(counts, 1))

    least = cost(layout.counts(first(0)))
    if least > most:
        raise ModelError(
            f"one channel of each layer costs {least}, but {math.floor(most)} were asked for",
            smallest=least,
            most=math.floor(most),
        )
    fitting = bisect_right(
        range(1, order.size + 1), most, key=lambda number: cost(layout.counts(first(number)))
    )
    return first(fitting)


def even(layout: Layout) -> list[Values]:
    """A ranking by which all layers keep the same share of their channels, whatever the weights say."""
    return [1.0 - np.arange(atom.size) / atom.size for atom in layout.free]
