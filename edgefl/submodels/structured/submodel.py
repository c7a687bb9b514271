"""Structured FIARSE: a tier holds the most important channels of every layer, selected again in each round (fiarse.md 8.3,
R5).

A bundle is compiled once with fixed shapes, but importance changes with the weights. So *how many* channels of each layer a
tier holds is fixed at export, by one threshold over all channels of the initial weights. *Which* ones is decided in each
round, and the dense slices of any selection fit the same graphs. As layers gain and lose importance the numbers age.
:meth:`Structured.replan` returns a tier with the numbers for today's weights, at the cost of a new bundle for every
device of the tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.narrow import channels_of, narrow
from edgefl.submodels.channels.selection import Selection, leading, regions
from edgefl.submodels.importance.thresholds import check_gamma
from edgefl.submodels.structured.carrier import THETA, ChannelCarrier, Measure
from edgefl.submodels.structured.counts import (
    Budget,
    ChannelLayout,
    ChannelScore,
    cost_of,
    even_ranking,
    layouts,
    search,
    strongest_indices,
    uncuttable_reasons,
)
from edgefl.submodels.structured.groups import ChannelGroup, Source, channel_groups
from edgefl.submodels.submodel import Submodel, units_with_tensors
from edgefl.wire.regions import Placement, Region, extract
from edgefl.wire.tensors import Array, Arrays

Policy = Literal["threshold", "even"]
# A device adds up a score in another order than the server; the last digits must not drop the weakest channel.
_MARGIN = 1e-5
# Number of tensors in a message that lists those that cannot be cut.
_TOLD = 4


@dataclass(frozen=True, eq=False)
class Structured(Submodel):
    """The highest-ranked channels of ``spec``, as a narrower model of at most ``gamma`` of its cost.

    A group is one channel with everything that is tied to it: by residual additions, depthwise convolutions, gates, heads.
    Every layer keeps at least one channel. Channels are ranked by their whole kernels. A device can score only its own
    slices, so theta of a layer is the smallest of those scores at the start of the round. It is 0 if a single channel is
    kept, which must not be dropped. A layer that keeps all its channels has no theta, so gamma = 1 is plain SGD on the
    whole model (fiarse.md A8).

    Attributes:
        gamma: Share of the cost, in (0, 1].
        budget: Cost: parameters, or multiply-accumulates of a forward pass.
        score: Measure of a channel's importance.
        counts: ``threshold`` for one threshold over all channels of the initial weights, ``even`` for the same share of
            each layer, or the numbers themselves, in the order of :attr:`layers`.

    Raises:
        ModelError: gamma is out of range or below the smallest slice, no channel of the model can be cut, or its code
            stores a size.
    """

    kind = "importance_structured"
    spec: ModelSpec
    gamma: float
    budget: Budget = "parameters"
    score: ChannelScore = ChannelScore()  # noqa: RUF009  frozen
    counts: Policy | tuple[int, ...] = "threshold"

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        for what, value, known in (
            ("budget", self.budget, get_args(Budget)),
            ("counts", self.counts, get_args(Policy)),
        ):
            if isinstance(value, str) and value not in known:
                raise ModelError(f"{what} is one of {', '.join(known)}; found {value!r}", **{what: value})
        if not channels_of(self.spec).cut() and (self.gamma < 1 or not isinstance(self.counts, str)):
            raise ModelError(
                f"nothing in {self.spec.name} can be cut by channels; tiers of kind output_side or importance fit any "
                "model",
                model=self.spec.name,
            )
        _ = self.numbers

    @property
    def suffix(self) -> nn.Sequential:
        return self._made[2]

    @cached_property
    def units(self) -> tuple[str, ...]:
        return () if self._selected else units_with_tensors(self.spec.module)

    @property
    def moves(self) -> bool:
        return bool(self._selected)

    @property
    def identity(self) -> Mapping[str, object]:
        return {
            "kind": self.kind,
            "layers": self.layers,
            "numbers": list(self.numbers),
            "source": self.score.source,
            "measure": self.score.measure,
        }

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of channels of each layer that the tier holds, in the order of :attr:`layers`."""
        return self._made[1]

    @cached_property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Tuple (number of held channels, number of all channels) of each layer, by the first dimension that holds them.

        Its name is the tensor and the dimension, such as ``conv.weight[0]``. If several layers are in one dimension
        (gated units, fused projections), the names after the first end in #2, #3, ...
        """
        holders, occurrences = channels_of(self.spec).holders, Counter[str]()
        layers: dict[str, tuple[int, int]] = {}
        for atom, number in zip(self._layout.free if self._layout else (), self.numbers, strict=True):
            tensor, dim = holders[atom][0]
            name = f"{tensor}[{dim}]"
            occurrences[name] += 1
            layers[name if occurrences[name] == 1 else f"{name}#{occurrences[name]}"] = (number, atom.size)
        return layers

    @cached_property
    def carrier(self) -> ChannelCarrier | None:
        if not self._selected:
            return None
        state = self.suffix.state_dict(keep_vars=True)
        local = {name: TensorSpec.holding(tensor) for name, tensor in state.items()}
        channels = channels_of(self.spec)
        made = channel_groups(
            self.spec, channels, [group.atom for group in self._trained], self._selected, self.score.source
        )
        return ChannelCarrier(local, made, self.score.measure)

    def select(self, weights: Mapping[str, Array]) -> Selection:
        """Return the held channels for the global ``weights``: the most important ones of each layer, ascending, by
        atom.

        An atom is the group of channels of a layer and of all layers tied to it. Of equal channels the lowest index
        is held.

        Raises:
            ModelError: A weight is not finite.
        """
        return {
            group.atom: strongest_indices(self.score.of(group, weights), len(self._selected[group.atom]))
            for group in self._groups
        }

    def regions(self, weights: Mapping[str, Array]) -> Mapping[str, Region]:
        """Return the held region of each state tensor for the global ``weights``, by name. None: the whole tensor."""
        return regions(channels_of(self.spec), self.select(weights))

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the regions (positions in the global ``weights``) of the most important channels, and their values as
        the payload.

        The payload has arrays that only this tier receives. If no channel is cut, the regions are all tensors and the
        payload is empty. The round's number has no effect.
        """
        if not self._selected:
            return Placement(dict.fromkeys(self.spec.weights))
        own_regions = self.regions(weights)
        payload: Arrays = extract(weights, own_regions)
        assert self.carrier is not None
        if self.carrier.groups:
            scores = [self.score.of(group, payload) for group in self.carrier.groups]
            smallest = np.array([own.min() if own.size > 1 else 0.0 for own in scores])
            payload[THETA] = (smallest * (1 - _MARGIN)).astype(np.float32)
        return Placement(own_regions, payload)

    def replan(self, weights: Mapping[str, Array]) -> Structured:
        """Return the same tier with the numbers of channels that its threshold gives for ``weights``.

        If :attr:`numbers` differ, so do its identity and its graphs. Devices then download a new bundle once.
        """
        policy: Policy = self.counts if isinstance(self.counts, str) else "threshold"
        if self._layout is None:
            return self
        return replace(self, counts=self._search(self._layout, policy, weights))

    @cached_property
    def _made(self) -> tuple[ChannelLayout | None, tuple[int, ...], nn.Sequential]:
        """Tuple (layout that the model's code supports, numbers of channels, resulting model).

        If nothing can be cut for this size, it is (None, (), the whole model).

        Raises:
            ModelError: No layout works, or the smallest slice is above the budget.
        """
        channels, refused = channels_of(self.spec), None
        initial = _arrays(self.spec)
        for layout in layouts(channels):
            try:
                numbers = self._numbers(layout, initial)
                selection = leading(layout.counts(numbers))
                made = narrow(self.spec, channels, selection) if selection else self.spec.module
                return layout, numbers, made
            except ModelError as error:
                if "smallest" in error.details:
                    raise
                refused = refused or error
        if refused is None:
            return None, (), self.spec.module
        raise ModelError(
            f"{self.spec.name} cannot be cut to the {self.gamma:g} part of its channels: {refused.message}",
            **{"model": self.spec.name, "gamma": self.gamma} | refused.details,
        ) from refused

    def _numbers(self, layout: ChannelLayout, initial: Mapping[str, Array]) -> tuple[int, ...]:
        if isinstance(self.counts, str):
            return self._search(layout, self.counts, initial)
        sizes = tuple(atom.size for atom in layout.free)
        fits = len(self.counts) == len(sizes) and all(
            1 <= own <= size for own, size in zip(self.counts, sizes, strict=True)
        )
        if not fits:
            raise ModelError(
                f"counts of {self.spec.name} are {len(sizes)} numbers from 1 to {sizes}; found {self.counts}",
                counts=self.counts,
                sizes=sizes,
            )
        cost = cost_of(self.spec, layout.channels, self.budget)
        own, most = cost(layout.counts(self.counts)), self.gamma * cost(layout.counts(sizes))
        if own > most + 1e-9:
            raise ModelError(
                f"counts {self.counts} of {self.spec.name} leave {own} {self.budget}, more than {self.gamma:g} of all; "
                f"lower them, or leave gamma out",
                counts=self.counts,
                smallest=own,
            )
        return self.counts

    def _search(self, layout: ChannelLayout, policy: Policy, weights: Mapping[str, Array]) -> tuple[int, ...]:
        sizes = tuple(atom.size for atom in layout.free)
        if self.gamma == 1:
            return sizes
        if policy == "even":
            ranked = even_ranking(layout)
        else:
            own = channel_groups(self.spec, layout.channels, layout.free, {}, self.score.source)
            ranked = self.score.ranked(own, weights, _arrays(self.spec))
        cost = cost_of(self.spec, layout.channels, self.budget)
        whole = cost(layout.counts(sizes))
        try:
            return search(layout, ranked, cost, self.gamma * whole + 1e-9)
        except ModelError as error:
            smallest = float(str(error.details["smallest"])) / whole
            reasons = uncuttable_reasons(self.spec, layout.channels)
            reason_text = "; ".join(f"{name!r} ({reason})" for name, reason in list(reasons.items())[:_TOLD])
            raise ModelError(
                f"no slice of {self.spec.name} has {self.gamma:g} of its {whole} {self.budget}: one channel of each layer "
                f"has {error.details['smallest']}; the smallest gamma is {smallest:.4g}"
                + (f". These tensors stay whole: {reason_text}" if reason_text else ""),
                model=self.spec.name,
                gamma=self.gamma,
                smallest=smallest,
                whole=reasons,
            ) from error

    @cached_property
    def _layout(self) -> ChannelLayout | None:
        return self._made[0]

    @cached_property
    def _selected(self) -> Selection:
        """First channels of each layer that is cut, which give the sizes of the slice. Empty for the whole model."""
        return leading(self._layout.counts(self.numbers)) if self._layout else {}

    @cached_property
    def _groups(self) -> tuple[ChannelGroup, ...]:
        """Groups of channels of the layers that are cut, in the whole model's sizes."""
        return channel_groups(self.spec, channels_of(self.spec), self._selected, {}, self.score.source)

    @cached_property
    def _trained(self) -> tuple[ChannelGroup, ...]:
        """Groups of channels whose scores change in training, so that they need a threshold."""
        moved = {name for name, parameter in self.spec.module.named_parameters() if parameter.requires_grad}
        return tuple(group for group in self._groups if all(part.name in moved for part in group.own))


def _arrays(spec: ModelSpec) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in spec.weights.items()}


def importance_structured(
    spec: ModelSpec,
    *,
    gamma: float = 1.0,
    budget: Budget = "parameters",
    score: Source = "kernel",
    measure: Measure = "rms",
    relative: bool = True,
    counts: Policy | Sequence[int] = "threshold",
) -> Structured:
    """Return the most important channels of every layer, selected again in each round, as a dense model of ``gamma`` of
    the whole.

    Train them with algorithm ``tcbgd`` (FIARSE by channels, fiarse.md 8.3, R5).

    Args:
        spec: Model.
        gamma: Share of the budget, in (0, 1].
        budget: Cost that ``gamma`` limits: ``parameters`` or ``macs`` (multiply-accumulates).
        score: Tensors that give a channel's importance: its ``kernel`` weights, or the scale of its ``norm``.
        measure: ``rms`` (root mean square) or ``mean`` (mean magnitude) of their entries.
        relative: True: compare a channel with its layer's initial values. False: one threshold leaves layers of
            large fan-in a single channel each (fiarse.md A9), and small tiers learn nothing.
        counts: ``threshold``, ``even``, or the channels of each layer.

    Raises:
        ModelError: gamma is out of range or below the smallest slice, or no channel of the model can be cut.
    """
    numbers = counts if isinstance(counts, str) else tuple(counts)
    return Structured(spec, gamma, budget, ChannelScore(score, measure, relative), numbers)
