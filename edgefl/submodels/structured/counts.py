"""Channel importance, and the number of channels per layer.

One threshold over all channels decides the numbers, so that the slice meets gamma (R5).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom
from edgefl.submodels.channels.narrow import narrow
from edgefl.submodels.channels.selection import Channels, Prefer, count_elements, leading
from edgefl.submodels.cost import macs
from edgefl.submodels.structured.carrier import Measure
from edgefl.submodels.structured.groups import ChannelGroup, Source
from edgefl.wire.tensors import Array

ChannelValues = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChannelScore:
    """Measure of a channel's importance (fiarse.md 8.3, R5).

    Attributes:
        source: Tensors that are measured: the kernels that compute the channel, or the scales of its norm, such as
            |gamma|.
        measure: "rms": root mean square of their entries. "mean": mean magnitude.
        relative: True: divide by the same measure of the whole layer at initialisation when channels of different layers
            compete, so that layers of any fan-in compete equally.
    """

    source: Source = "kernel"
    measure: Measure = "rms"
    relative: bool = True

    def __post_init__(self) -> None:
        for what, value, known in (
            ("score", self.source, get_args(Source)),
            ("measure", self.measure, get_args(Measure)),
        ):
            if value not in known:
                raise ModelError(f"{what} is one of {', '.join(known)}; found {value!r}", **{what: value})

    def of(self, group: ChannelGroup, weights: Mapping[str, Array]) -> ChannelValues:
        """Return the importance of each channel of ``group``, float64 (channels,).

        It is not divided by the measure of the layer at initialisation, even with :attr:`relative`.

        Args:
            group: Channels of one layer.
            weights: Weights by global name.

        Raises:
            ModelError: A weight is not finite.
        """
        total, shapes = 0.0, {part.name: weights[part.name].shape for part in group.scored}
        for part in group.scored:
            values = np.moveaxis(weights[part.name], part.dim, 0).astype(np.float64)
            if not np.isfinite(values).all():
                raise ModelError(
                    f"{part.name!r} has entries that are NaN or infinite, so importance cannot rank its channels; go "
                    "back to the last good weights, and lower the learning rate",
                    name=part.name,
                )
            raised = np.square(values) if self.measure == "rms" else np.abs(values)
            total = total + raised.reshape(len(values), -1).sum(1)[part.positions].sum(1)
        mean = np.asarray(total) / group.entries(shapes)
        return np.sqrt(mean) if self.measure == "rms" else mean

    def ranked(
        self, groups: Sequence[ChannelGroup], weights: Mapping[str, Array], initial: Mapping[str, Array]
    ) -> list[ChannelValues]:
        """Return the importance of each group's channels, comparable across groups: one float64 array (channels,) per
        group.

        With :attr:`relative` it is divided by the measure of the layer at initialisation.

        Args:
            groups: Channels of each layer.
            weights: Current weights by global name.
            initial: Weights at initialisation, by global name.

        Raises:
            ModelError: A weight is not finite.
        """
        scores = [self.of(group, weights) for group in groups]
        if not self.relative:
            return scores
        return [own / self._scale(group, initial) for own, group in zip(scores, groups, strict=True)]

    def _scale(self, group: ChannelGroup, initial: Mapping[str, Array]) -> float:
        first = self.of(group, initial)
        whole = np.sqrt(np.square(first).mean()) if self.measure == "rms" else first.mean()
        return float(whole) or 1.0


def strongest_indices(values: ChannelValues, count: int) -> tuple[int, ...]:
    """Return the indices of the ``count`` largest ``values``, ascending. Of equal values, the lowest indices."""
    return tuple(sorted(int(index) for index in np.argsort(-values, kind="stable")[:count]))


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
class ChannelLayout:
    """One way to cut a model: the atoms (groups of channels) to cut, and atoms whose numbers follow from others.

    Attributes:
        channels: Structure of the model's dimensions.
        cut: Atoms to cut.
        followers: Atoms by follower. A follower keeps as many indices as the product of
            these atoms. Code that uses the width of attention as the width of its input requires that.
    """

    channels: Channels
    cut: tuple[Atom, ...]
    followers: Mapping[Atom, tuple[Atom, ...]]

    @cached_property
    def free(self) -> tuple[Atom, ...]:
        """Return the atoms (groups of channels) whose number is chosen freely: all of :attr:`cut` but :attr:`followers`."""
        return tuple(atom for atom in self.cut if atom not in self.followers)

    def counts(self, numbers: Sequence[int]) -> dict[Atom, int]:
        """Return the number of channels of every cut atom (group of channels).

        ``numbers`` has the numbers of the atoms :attr:`free`, in order; the others follow from them.
        """
        atom_counts = dict(zip(self.free, numbers, strict=True))
        for atom, run in self.followers.items():
            atom_counts[atom] = math.prod(atom_counts.get(inner, inner.size) for inner in run)
        return {atom: atom_counts[atom] for atom in self.cut}


def layouts(channels: Channels) -> Iterator[ChannelLayout]:
    """Yield the ways to cut a model, the preferred one first. Only a run shows which of them the model's code supports."""
    seen: list[tuple[tuple[Atom, ...], Mapping[Atom, tuple[Atom, ...]]]] = []
    for prefer, tied in _WAYS:
        cut = channels.cut(prefer)
        followers = _followers(channels, cut) if tied else {}
        if cut and (cut, followers) not in seen:
            seen.append((cut, followers))
            yield ChannelLayout(channels, cut, followers)


def _followers(channels: Channels, cut: Sequence[Atom]) -> dict[Atom, tuple[Atom, ...]]:
    """Return, for each follower among ``cut``, the atoms (groups of channels) whose product gives its number of channels.

    A follower has the same size as a product of atoms, such as heads times entries per head. The atoms of further products
    of this size follow the atoms of the first product.
    """
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
    """Return a function from channel counts (number by group of channels) to the cost of the slice with these channels.

    Args:
        spec: Model.
        channels: Structure of its dimensions.
        budget: Cost: "parameters", or "macs", the multiply-accumulates of a sample's forward pass.
    """
    names = [name for name, _ in spec.module.named_parameters()]

    def parameters(counted: Counts) -> int:
        return count_elements(channels, leading(counted), names)

    def multiplications(counted: Counts) -> int:
        return macs(narrow(spec, channels, leading(counted)), spec.sample)

    return parameters if budget == "parameters" else multiplications


def uncuttable_reasons(spec: ModelSpec, channels: Channels) -> dict[str, str]:
    """Return the size of each parameter that cannot be cut and the reason, as text by name, the largest parameter first.

    Parameters below a hundredth of the model are left out, such as the biases of the classes.
    """
    sizes = {name: parameter.numel() for name, parameter in spec.module.named_parameters()}
    least = sum(sizes.values()) / 100
    large = (name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= least)
    return {
        name: f"{sizes[name]} entries: {reason}" for name in large if (reason := channels.why_whole(name))
    }


def search(
    layout: ChannelLayout, ranked: Sequence[ChannelValues], cost: Callable[[Counts], int], most: float
) -> tuple[int, ...]:
    """Return the number of channels of each free atom: the longest prefix of the ranking that costs at most ``most``.

    An atom is a group of channels, such as the outputs of a layer. Each keeps at least one channel. Channels are
    taken in order of importance, ties by lowest atom and index, up to the first that does not fit. So the result is
    one threshold, and is nested in ``most``. Costs interact and grow with every channel, so bisection finds the
    number of channels.

    Args:
        layout: Way to cut.
        ranked: Importance of the channels of each free atom.
        cost: Function from channel counts (number by atom) to the cost.
        most: Largest cost.

    Raises:
        ModelError: One channel of each atom costs more than ``most``. ``details["smallest"]`` is that cost.
    """
    owners = np.repeat(np.arange(len(ranked)), [values.size for values in ranked])
    order = owners[np.argsort(-np.concatenate(ranked), kind="stable")]

    def first(number: int) -> tuple[int, ...]:
        counts = np.bincount(order[:number], minlength=len(ranked))
        return tuple(int(count) for count in np.maximum(counts, 1))

    least = cost(layout.counts(first(0)))
    if least > most:
        raise ModelError(
            f"one channel of each layer costs {least}, and the budget is {math.floor(most)}",
            smallest=least,
            most=math.floor(most),
        )
    fitting = bisect_right(
        range(1, order.size + 1), most, key=lambda number: cost(layout.counts(first(number)))
    )
    return first(fitting)


def even_ranking(layout: ChannelLayout) -> list[ChannelValues]:
    """Return an importance per channel of each free atom (group of indices that is cut as one), by which all layers
    keep the same share of their channels.

    It does not depend on the weights.
    """
    return [1.0 - np.arange(atom.size) / atom.size for atom in layout.free]
