"""How channels that compete by importance are trained: TCB-GD with one mask for each channel (fiarse.md 2.4; 8.3, R5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.objective.carrier import Whole
from edgefl.submodels.structured.gradient import Measure, direction, slope
from edgefl.submodels.structured.groups import Group, Part

THETA = "submodel.theta"
"""The payload's own tensor, beside the slices: one threshold for each group."""


@dataclass(frozen=True, eq=False)
class Channelwise(Whole):
    """Dense slices and a threshold for each of ``groups``, whose parts lie in these slices; an update has the slices.

    The switches of TCB-GD: ``remask`` evaluates M_c = 1{s_c >= theta} anew in each step and takes channels that have
    fallen below their threshold out of the forward pass of training, where the slice then computes what it would without
    them (a norm across channels still counts them); ``bias`` lets the gradient flow through the mask (R4's formula, the
    group being a channel's kernels, biases and norm pairs). Both off is pruning-greedy. ``freeze_dropped`` keeps
    momentum and decay from moving dropped channels.
    """

    groups: tuple[Group, ...]
    measure: Measure = "rms"
    remask: bool = False
    bias: bool = False
    freeze_dropped: bool = True

    def switched(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> Channelwise:
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
        """W = where(M, w, 0) where channels are read (:attr:`Group.gated`); inference reads all that was sent."""
        if not (training and self.remask):
            return weights
        return _where(self._masks(weights, gates, [group.gated for group in self.groups]), weights, {})

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """M_c (g_j + (sum_{i in c} g_i x_i) 2 theta / (s_c + theta)^2 ds_c/dx_j) for the entries of a channel's group."""
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

    def score(self, group: Group, weights: Tensors) -> Tensor:
        """(channels,), a constant for gradients."""
        shapes = {name: spec.shape for name, spec in self.weights.items()}
        rms = self.measure == "rms"
        read = [(weights[part.name].detach(), part) for part in group.scored]
        sums = [_sums(x.square() if rms else x.abs(), part) for x, part in read]
        mean = _total(sums) / group.entries(shapes)
        return mean.sqrt() if rms else mean

    def _masks(self, weights: Tensors, gates: Tensors, parts: Sequence[Sequence[Part]]) -> dict[str, Tensor]:
        """Per tensor, the entries (broadcast) whose channels are all held, by the ``parts`` of each group."""
        masks: dict[str, Tensor] = {}
        for group, theta, own in zip(self.groups, self._theta(gates), parts, strict=True):
            channel_mask = self.score(group, weights) >= theta
            for part in own:
                mask = _spread(channel_mask, part, weights[part.name], True)
                masks[part.name] = masks[part.name] & mask if part.name in masks else mask
        return masks


def _sums(x: Tensor, part: Part) -> Tensor:
    """(channels,): the sum of each channel's entries of ``x``."""
    others = [dim for dim in range(x.dim()) if dim != part.dim]
    sums = x.sum(others) if others else x
    return sums if part.plain else sums[torch.from_numpy(part.positions)].sum(1)


def _total(sums: Sequence[Tensor]) -> Tensor:
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


def _spread(values: Tensor, part: Part, x: Tensor, other: float | bool) -> Tensor:
    """(channels,) along dimension ``part.dim`` of ``x``, to broadcast; ``other`` where a position has no channel."""
    if not part.plain:
        padded = torch.cat((values, torch.full((1,), other, dtype=values.dtype)))
        places = part.members.copy()
        places[places < 0] = values.shape[0]
        values = padded[torch.from_numpy(places)]
    return values.reshape([-1 if dim == part.dim else 1 for dim in range(x.dim())])


def _where(masks: Mapping[str, Tensor], inside: Tensors, outside: Tensors) -> Tensors:
    """``inside`` where a mask holds, ``outside`` (by default zeros) elsewhere: selected, so that not even NaN gets in."""
    tensors = dict(inside)
    for name, mask in masks.items():
        tensors[name] = torch.where(mask, inside[name], outside.get(name, torch.zeros(())))
    return tensors
