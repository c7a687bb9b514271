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
    """Conversion between the tensors that a tier downloads and uploads, and those that its units compute with.

    By default tensors are not changed, and there are neither gates nor noise. "Gates" are masks and thresholds that stay
    constant during local training. "Noise" are tensors of uniform random numbers. All mappings are by local name of the
    tensor.
    """

    @property
    @abstractmethod
    def payload(self) -> Specs:
        """Specs of the tensors that the server sends, by local name.

        They are ports ``weights.*`` of ``start`` and ``evaluate``.
        """

    @property
    @abstractmethod
    def update(self) -> Specs:
        """Specs of the tensors that a device sends, by local name: the result of :meth:`pack`.

        The regions of a placement (positions in the global model) have the same names.
        """

    @property
    def gates(self) -> Specs:
        """Specs of the masks and thresholds that stay constant during local training, by name after ``state.gate.``;
        default {}.
        """
        return {}

    @property
    def noise(self) -> Specs:
        """Specs of the uniform tensors that :meth:`effective` reads in training, by name after ``noise.``; default {}."""
        return {}

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        """Return (weights in the units' shapes, masks and thresholds), both by local name.

        ``payload`` has the received tensors of :attr:`payload`.
        """
        return payload, {}

    def held(self, gates: Tensors) -> Tensors:
        """Return a bool mask for each tensor that the tier holds only partly, by name. True: the tier holds the entry.

        {} if the tier holds all its tensors completely.
        """
        return {}

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the tensors that the units compute with, as a differentiable function of ``weights``.

        Args:
            weights: Result of :meth:`unpack`, or some of its tensors.
            gates: Masks and thresholds that :meth:`unpack` returned.
            noise: Tensors of :attr:`noise`; unused in inference.
            training: True in a training step, False in inference.
        """
        return weights

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the direction in which a step moves ``weights``, by name; the step subtracts it. By default the gradient.

        Args:
            grads: Gradient of the loss by ``weights``, through :meth:`effective`.
            weights: Weights at which the gradient was taken.
            gates: Masks and thresholds that :meth:`unpack` returned.
        """
        return grads

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        """Return ``new`` at the entries that a training step may change, and ``old`` at all others.

        Momentum and weight decay also change entries without a gradient; this restores them.

        Args:
            new: Weights after the step.
            old: Weights before the step.
            gates: Masks and thresholds that :meth:`unpack` returned.
        """
        return new

    def keep_idle(self, moved: Tensors, before: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        """Return the moving statistics after a step, without changes to channels that the step did not use.

        Args:
            moved: Statistics after the step.
            before: Statistics before the step, which are kept for unused channels.
            noise: Tensors of :attr:`noise` with which the step drew its channels.
        """
        return moved

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the tensors that a device sends (:attr:`update`), by local name.

        Args:
            weights: Trained weights, or other values of the same shapes, such as codes of quantized weights.
            gates: Masks and thresholds that :meth:`unpack` returned.
        """
        return weights


@runtime_checkable
class ThresholdCarrier(Protocol):
    """Interface of a carrier (conversion between sent tensors and weights) whose masks depend on thresholds.

    :func:`edgefl.algorithms.submodels.tcbgd.tcbgd` trains it.
    """

    def with_switches(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> Carrier:
        """Return a copy of the carrier (conversion between sent tensors and weights) with other switches.

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
