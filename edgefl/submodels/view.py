"""Weights that travel as they are and that training computes with in another form: scaled, or with parts left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from edgefl.programs.carrier import Specs
from edgefl.programs.contract import Tensors

Noise = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class View:
    """The payload is the weights and the weights are the update; inference reads them too.

    Training reads ``through`` of them, a function of (weights, noise) that gradients pass. ``at_rest`` of (moved,
    before, noise) says what becomes of moving statistics where that leaves channels out.
    """

    weights: Specs
    through: Callable[[Tensors, Noise], Tensors]
    at_rest: Callable[[Tensors, Tensors, Noise], Tensors] = lambda moved, before, noise: moved
    noise: Specs = field(default_factory=dict)

    @property
    def payload(self) -> Specs:
        return self.weights

    @property
    def gates(self) -> Specs:
        return {}

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        return payload, {}

    def effective(self, weights: Tensors, gates: Tensors, noise: Noise, *, training: bool) -> Tensors:
        return self.through(weights, noise) if training else weights

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        return grads

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        return new

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        return weights

    def rested(self, moved: Tensors, before: Tensors, noise: Noise) -> Tensors:
        return self.at_rest(moved, before, noise)
