"""Carrier of a tier's tensors: from the payload of a round to weights and gates, and back to an update.

A submodel kind that only leaves out whole tensors, or cuts them to smaller ones, has the :class:`Whole` carrier.
One that holds single entries (importance) unpacks them into dense tensors and gates them with masks while it trains.
All methods are pure functions of named tensors and are traced into the algorithm's graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec

Specs = Mapping[str, TensorSpec]


class Carrier(ABC):
    """Conversion between a tier's payload and the tensors that its units read; by default without changes."""

    @property
    @abstractmethod
    def payload(self) -> Specs:
        """Return the ``weights.*`` ports of ``start`` and ``evaluate``, by local name."""

    @property
    @abstractmethod
    def update(self) -> Specs:
        """Return the specs of the result of :meth:`pack`: the regions of a placement."""

    @property
    def gates(self) -> Specs:
        """Return masks and thresholds that training keeps (``state.gate.*``) and no step changes."""
        return {}

    @property
    def noise(self) -> Specs:
        """Return the uniform tensors that :meth:`effective` reads in training (``noise.*``)."""
        return {}

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        """Return (weights in the units' shapes, gates) from the tensors of :attr:`payload`."""
        return payload, {}

    def held(self, gates: Tensors) -> Tensors:
        """Return bool masks of the tier's entries, for the tensors that it holds in part."""
        return {}

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the tensors that the units compute with. Differentiable; ``weights`` may be a part of all."""
        return weights

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the direction to descend along, from the loss's gradient by ``weights`` through :meth:`effective`."""
        return grads

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        """Return ``new`` for the entries that a step from ``old`` may move, ``old`` for others (momentum moves all)."""
        return new

    def rested(self, moved: Tensors, before: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        """Return moving statistics: ``moved``, with the entries of ``before`` for channels that the step left out."""
        return moved

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the update's tensors. ``weights`` may hold something else of the same shapes, such as codes."""
        return weights


@runtime_checkable
class Thresholded(Protocol):
    """Carrier whose masks and gradients follow thresholds, see :func:`edgefl.algorithms.submodels.tcbgd.tcbgd`."""

    def switched(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> Carrier:
        """Return the same carrier with these switches."""


@dataclass(frozen=True, eq=False)
class Whole(Carrier):
    """Carrier whose payload is the weights, which are the update: full models, output sides, dense slices."""

    weights: Specs

    @property
    def payload(self) -> Specs:
        return self.weights

    @property
    def update(self) -> Specs:
        return self.weights
