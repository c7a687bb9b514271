"""Carrier of a tier's tensors: from the payload of a round to weights and gates, and back to an update.

A submodel kind that only leaves out whole tensors, or cuts them to smaller ones, has a :class:`WholeCarrier`. A kind
that holds single entries (importance) unpacks them into dense tensors. It masks these with gates while it trains. All
methods are pure functions of named tensors and are traced into the algorithm's graphs.
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
    """Conversion between a tier's payload and the tensors that its units read. The defaults change nothing.

    "Gates" are masks and thresholds that a carrier needs in training. "Noise" are uniform random tensors.
    """

    @property
    @abstractmethod
    def payload(self) -> Specs:
        """Specs of the tensors that the server sends: the ``weights.*`` ports of ``start`` and ``evaluate``, by local
        name.
        """

    @property
    @abstractmethod
    def update(self) -> Specs:
        """Specs of the tensors that a device sends: the result of :meth:`pack`, and the regions of a placement, by
        local name.
        """

    @property
    def gates(self) -> Specs:
        """Specs of the masks and thresholds that stay constant during local training (``state.gate.*``)."""
        return {}

    @property
    def noise(self) -> Specs:
        """Specs of the uniform tensors that :meth:`effective` reads in training (``noise.*``)."""
        return {}

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        """Return (weights in the units' shapes, gates) by local name, from the tensors of :attr:`payload`."""
        return payload, {}

    def held(self, gates: Tensors) -> Tensors:
        """Return a bool mask for each tensor of which the tier holds only a part. True: the tier holds the entry."""
        return {}

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the tensors that the units compute with, as a differentiable function of ``weights``.

        Args:
            weights: Result of :meth:`unpack`, or some of its tensors.
            gates: Gates of :meth:`unpack`.
            noise: Tensors of :attr:`noise`; unused in inference.
            training: True in a training step, False in inference.
        """
        return weights

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the direction in which a step moves ``weights``.

        Args:
            grads: Gradient of the loss by ``weights``, through :meth:`effective`.
            weights: Weights at which it was taken.
            gates: Gates of :meth:`unpack`.
        """
        return grads

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        """Return ``new`` at the entries that a step from ``old`` may move, and ``old`` at all others.

        Momentum and weight decay change entries without a gradient; this undoes that.
        """
        return new

    def keep_idle(self, moved: Tensors, before: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        """Return the moving statistics after a step: ``moved``, but ``before`` for channels that the step with
        ``noise`` left out.
        """
        return moved

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the tensors of :attr:`update`. ``weights`` may hold other values of the same shapes, such as codes."""
        return weights


@runtime_checkable
class ThresholdCarrier(Protocol):
    """Carrier whose masks and gradients depend on thresholds, for :func:`edgefl.algorithms.submodels.tcbgd.tcbgd`."""

    def with_switches(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> Carrier:
        """Return a copy of the carrier with other switches.

        Args:
            remask: Compute the mask again in each step.
            bias: Let gradients flow through the mask.
            freeze_dropped: Keep momentum and weight decay from moving entries that the mask dropped.
        """


@dataclass(frozen=True, eq=False)
class WholeCarrier(Carrier):
    """Carrier that sends and receives all weights of a submodel unchanged, without mask or coding.

    It serves the full model, a model's last layers (kind ``output_side``), and submodels that are slices of the tensors.
    """

    weights: Specs

    @property
    def payload(self) -> Specs:
        return self.weights

    @property
    def update(self) -> Specs:
        return self.weights
