"""Training of channels that compete by importance: TCB-GD with one mask per channel (fiarse.md 2.4; 8.3, R4 and R5).

For weights that are masked in groups b::

    w_b = x_b 1{s_b >= theta};
    p_b = clip((s_b - theta) / (s_b + theta), 0, 1)                      (backward pass);
    dF/dx_j = M_b (g_j + (sum_{i in b} g_i x_i) 2 theta / (s_b + theta)^2 ds_b/dx_j),   g = dF/dw;

by the product rule of fiarse.md 2.4 with one mask for the whole group. theta is a constant. A score is the root mean square
of the n entries it reads, ds/dx_j = x_j / (n s), or their mean magnitude, ds/dx_j = sign(x_j) / n. For n = 1 both are eq.
(3). Entries of a group that its score does not read (biases, norm pairs) have ds/dx_j = 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.objective.carrier import WholeCarrier
from edgefl.submodels.structured.groups import ChannelDim, ChannelGroup

Measure = Literal["rms", "mean"]


def slope(score: Tensor, theta: Tensor) -> Tensor:
    """Return 2 theta / (s + theta)^2 for the scores s, in their shape; 0 if s = theta = 0.

    It replaces the derivative of the mask s >= theta by s, which is 0 almost everywhere.
    """
    both = score + theta
    safe = torch.where(both > 0, both, torch.ones(()))
    return 2 * (theta / safe) / safe


def direction(x: Tensor, score: Tensor, entries: int, measure: Measure) -> Tensor:
    """Return ds/dx, the derivative of a group's score by its entries ``x``, in their shape. 0 if s = 0.

    Args:
        x: Entries of the group.
        score: Score s of the group, in a shape that broadcasts to ``x``.
        entries: Number n of entries that the score reads.
        measure: "rms" or "mean".
    """
    if measure == "mean":
        return x.sign() / entries
    return x / (entries * torch.where(score > 0, score, torch.ones(())))


THETA = "submodel.theta"
"""Name of the payload's own tensor besides the slices: one threshold per group."""


@dataclass(frozen=True, eq=False)
class ChannelCarrier(WholeCarrier):
    """Carrier of dense slices, and of a threshold theta for each of ``groups``, whose channels are in these slices.

    An update has the slices only.

    Attributes:
        groups: Channels of each layer that compete.
        measure: Measure of a channel's score.
        remask: True: compute M_c = 1{s_c >= theta} in each step. Channels below their threshold leave the forward
            pass of training, which then computes the slice without them (a norm across channels still counts
            them).
        bias: True: gradients flow through the mask (R4); a group is a channel's kernels, biases and norm pairs.
            With ``remask`` and ``bias`` off the method is pruning-greedy.
        freeze_dropped: True: momentum and decay do not move dropped channels.
    """

    groups: tuple[ChannelGroup, ...]
    measure: Measure = "rms"
    remask: bool = False
    bias: bool = False
    freeze_dropped: bool = True

    def with_switches(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> ChannelCarrier:
        return replace(self, remask=remask, bias=bias, freeze_dropped=freeze_dropped)

    @cached_property
    def payload(self) -> dict[str, TensorSpec]:
        return {**self.weights, **self._thetas(THETA)}

    @cached_property
    def gates(self) -> dict[str, TensorSpec]:
        return self._thetas("theta")

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        gates = {"theta": payload[THETA]} if THETA in payload else {}
        return {name: payload[name] for name in self.weights}, gates

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the weights that layers read, by name.

        Entries of dropped channels are 0 in the tensors that read these channels.

        The tensors are :attr:`ChannelGroup.gated`. In inference, and without ``remask``, return ``weights`` itself.
        """
        if not (training and self.remask):
            return weights
        return _where(self._masks(weights, gates, [group.gated for group in self.groups]), weights, {})

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the direction of a step, by name.

        For an entry x_j of channel c, with gradient g_j, it is M_c (g_j + (sum_{i in c} g_i x_i) 2 theta / (s_c +
        theta)^2 ds_c/dx_j). M_c is the mask and s_c the score of the channel. Without :attr:`bias` return ``grads``
        itself; without :attr:`remask` leave out M_c.
        """
        if not self.bias:
            return grads
        flow = dict(grads)
        for group, theta in zip(self.groups, self._theta(gates), strict=True):
            score = self.score(group, weights)
            total = _total([_sums(grads[part.name] * weights[part.name], part) for part in group.own])
            pull = total * slope(score, theta)
            entries = group.entries({name: spec.shape for name, spec in self.weights.items()})
            for part in group.scored:
                x = weights[part.name]
                along = direction(x, _spread(score, part, x, 1.0), entries, self.measure)
                flow[part.name] = flow[part.name] + _spread(pull, part, x, 0.0) * along
        if not self.remask:
            return flow
        return _where(self._masks(weights, gates, [group.own for group in self.groups]), flow, {})

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        if not (self.remask and self.freeze_dropped):
            return new
        parts = [group.own + group.read for group in self.groups]
        return _where(self._masks(old, gates, parts), new, old)

    def _thetas(self, name: str) -> dict[str, TensorSpec]:
        return {name: TensorSpec((len(self.groups),))} if self.groups else {}

    def _theta(self, gates: Tensors) -> Sequence[Tensor]:
        return [gates["theta"][number] for number in range(len(self.groups))]

    def score(self, group: ChannelGroup, weights: Tensors) -> Tensor:
        """Return the importance score of each channel of ``group``, (channels,), detached from gradients."""
        shapes = {name: spec.shape for name, spec in self.weights.items()}
        rms = self.measure == "rms"
        read = [(weights[part.name].detach(), part) for part in group.scored]
        sums = [_sums(x.square() if rms else x.abs(), part) for x, part in read]
        mean = _total(sums) / group.entries(shapes)
        return mean.sqrt() if rms else mean

    def _masks(
        self, weights: Tensors, gates: Tensors, parts: Sequence[Sequence[ChannelDim]]
    ) -> dict[str, Tensor]:
        """Return a mask of each tensor, by name, in a shape that broadcasts. True: all channels of the entry are held.

        Args:
            weights: Current weights by name.
            gates: Thresholds.
            parts: Dimensions of the channels of each group, in the order of :attr:`groups`.
        """
        masks: dict[str, Tensor] = {}
        for group, theta, own in zip(self.groups, self._theta(gates), parts, strict=True):
            channel_mask = self.score(group, weights) >= theta
            for part in own:
                mask = _spread(channel_mask, part, weights[part.name], True)
                masks[part.name] = masks[part.name] & mask if part.name in masks else mask
        return masks


def _sums(x: Tensor, part: ChannelDim) -> Tensor:
    """Return the sum of each channel's entries of ``x``, (channels,)."""
    others = [dim for dim in range(x.dim()) if dim != part.dim]
    sums = x.sum(others) if others else x
    return sums if part.plain else sums[torch.from_numpy(part.positions)].sum(1)


def _total(sums: Sequence[Tensor]) -> Tensor:
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


def _spread(values: Tensor, part: ChannelDim, x: Tensor, other: float | bool) -> Tensor:
    """Return ``values`` (channels,) in a shape that broadcasts with ``x`` along ``part.dim``.

    Positions along that dimension without a channel get ``other``.
    """
    if not part.plain:
        padded = torch.cat((values, torch.full((1,), other, dtype=values.dtype)))
        places = part.members.copy()
        places[places < 0] = values.shape[0]
        values = padded[torch.from_numpy(places)]
    return values.reshape([-1 if dim == part.dim else 1 for dim in range(x.dim())])


def _where(masks: Mapping[str, Tensor], inside: Tensors, outside: Tensors) -> Tensors:
    """Return ``inside`` by name, with other values where a mask is False: those of ``outside``, or 0 for names that it
    lacks.

    ``torch.where`` keeps even NaN out of the result, unlike a product.
    """
    tensors = dict(inside)
    for name, mask in masks.items():
        tensors[name] = torch.where(mask, inside[name], outside.get(name, torch.zeros(())))
    return tensors
