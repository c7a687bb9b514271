"""Weights that travel as they are and that training computes with in another form: scaled, or with parts left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from edgefl.contract.tensors import Tensors
from edgefl.objective.carrier import Specs, Whole

Noise = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class View(Whole):
    """The payload is the weights and the weights are the update; inference reads them too.

    Training reads ``through`` of them, a function of (weights, noise) that gradients pass; ``draws`` are the uniform
    tensors that it asks for. ``at_rest`` of (moved, before, noise) says what becomes of moving statistics where that
    leaves channels out.
    """

    through: Callable[[Tensors, Noise], Tensors]
    at_rest: Callable[[Tensors, Tensors, Noise], Tensors] = lambda moved, before, noise: moved
    draws: Specs = field(default_factory=dict)

    @property
    def noise(self) -> Specs:
        return self.draws

    def effective(self, weights: Tensors, gates: Tensors, noise: Noise, *, training: bool) -> Tensors:
        return self.through(weights, noise) if training else weights

    def rested(self, moved: Tensors, before: Tensors, noise: Noise) -> Tensors:
        return self.at_rest(moved, before, noise)
