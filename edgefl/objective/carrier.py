"""How a tier's tensors travel and act: from the payload of a round to weights and gates, and back to an update.

A submodel kind that only leaves out whole tensors, or cuts them to smaller ones, needs none of this: :class:`Whole`.
One that holds single entries (importance) unpacks them into dense tensors and gates them with masks while it trains.
All methods are pure functions of named tensors and are traced into the program's graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec

Specs = Mapping[str, TensorSpec]


class Carrier(Protocol):
    """What lies between a tier's payload and the tensors that the trained units read."""

    @property
    def payload(self) -> Specs:
        """The ``weights.*`` ports of ``start`` and ``evaluate``, by local name."""
        ...

    @property
    def gates(self) -> Specs:
        """What training keeps beside the weights (``state.gate.*``): masks and thresholds. Never changed by a step."""
        ...

    @property
    def noise(self) -> Specs:
        """Uniform tensors that :meth:`effective` reads in training (``noise.*``)."""
        ...

    @property
    def update(self) -> Specs:
        """What :meth:`pack` gives, by name: the regions of a placement."""
        ...

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        """(weights in the units' shapes, gates) from the tensors of :attr:`payload`."""
        ...

    def held(self, gates: Tensors) -> Tensors:
        """Masks of the entries that the tier holds, bool, for the tensors that it does not hold whole."""
        ...

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """The tensors that the units compute with. Differentiable; ``weights`` may be a part of all."""
        ...

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """The gradient to descend along, from the loss's gradient by ``weights`` through :meth:`effective`."""
        ...

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        """``new`` where a step from ``old`` may move an entry, ``old`` elsewhere (momentum and decay move all)."""
        ...

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        """The update's tensors. ``weights`` may hold something else of the same shapes, such as codes."""
        ...


@runtime_checkable
class Thresholded(Protocol):
    """A carrier whose masks and gradients follow thresholds, by the switches of
    :func:`edgefl.programs.submodels.tcbgd.tcbgd`."""

    def switched(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> Carrier:
        """The same carrier with these switches."""
        ...


@dataclass(frozen=True, eq=False)
class Whole:
    """The payload is the weights, and the weights are the update: full models, output sides, dense slices."""

    weights: Specs

    @property
    def payload(self) -> Specs:
        return self.weights

    @property
    def gates(self) -> Specs:
        return {}

    @property
    def noise(self) -> Specs:
        return {}

    @property
    def update(self) -> Specs:
        return self.weights

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        return payload, {}

    def held(self, gates: Tensors) -> Tensors:
        return {}

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        return weights

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        return grads

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        return new

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        return weights
