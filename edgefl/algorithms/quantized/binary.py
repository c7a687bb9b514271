"""Training of binary weights: the local training of BiFL and BiFL-Full (fedbat.md 3, 8.17)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from edgefl.errors import ModelError
from edgefl.facts.combinations import combination_hint
from edgefl.objective.carrier import Carrier, Specs, ThresholdCarrier
from edgefl.objective.objective import Objective
from edgefl.objective.parts import inference


def binary(
    objective: Objective,
    *,
    batch: int = 64,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: bool = False,
) -> Algorithm:
    """Return SGD on a model whose kernels are binary, in training and in inference: BiFL's training (fedbat.md 3, 8.17).

    The other options come from :func:`edgefl.algorithms.baselines.sgd.sgd`.

    The layers read B = mean|W| sign(W), per tensor, sign(0) = +1, for each kernel W (trained tensors of two and more
    dimensions, embeddings excepted; :attr:`Objective.kernels`). The gradient passes straight through, dL/dW := dL/dB, with
    ``clip`` only where |W| <= 1. Other tensors and activations do not change. The update holds W itself; the codec decides
    its encoding.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        momentum: Momentum of local SGD; its buffers are 0 at the start of a round.
        weight_decay: Weight decay of conv and dense kernels.
        clip: True: entries with |W| > 1 get no gradient.

    Raises:
        ModelError: The submodel is chosen by importance.
    """
    trained = binarize(objective, clip=clip)
    algorithm = sgd(trained, batch=batch, steps=steps, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return replace(algorithm, name="binary", inference=inference(trained))


def binarize(objective: Objective, *, clip: bool = False) -> Objective:
    """Return ``objective`` with layers that read binary kernels, mean|W| sign(W), in training and inference.

    Args:
        objective: Model part that a tier trains, with its loss.
        clip: True: entries with |W| > 1 get no gradient.

    Raises:
        ModelError: The submodel is chosen by importance, or has no trained kernel.
    """
    carrier = objective.carrier
    if isinstance(carrier, ThresholdCarrier):
        raise ModelError(
            "binary weights have one magnitude per tensor, so importance has nothing to choose by: train this "
            "submodel by sgd or tcbgd, or choose a kind that cuts by position, such as width "
            f"({combination_hint(algorithm='binary', kind='importance')})",
            carrier=type(carrier).__name__,
        )
    if not objective.kernels:
        raise ModelError(
            "the algorithm binary needs a trained kernel of two or more dimensions, and this submodel has none; train "
            "it by sgd",
            tensors=objective.trainable,
        )
    return replace(objective, carried=BinaryCarrier(carrier, objective.kernels, clip))


@dataclass(frozen=True, eq=False)
class BinaryCarrier(Carrier):
    """Wrapper of the carrier ``inner`` (conversion between sent tensors and weights): layers read ``kernels`` as binary.

    Server and device exchange the same tensors as with ``inner``.
    """

    inner: Carrier
    kernels: frozenset[str]
    clip: bool = False

    @property
    def payload(self) -> Specs:
        return self.inner.payload

    @property
    def gates(self) -> Specs:
        return self.inner.gates

    @property
    def noise(self) -> Specs:
        return self.inner.noise

    @property
    def update(self) -> Specs:
        return self.inner.update

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        return self.inner.unpack(payload)

    def held(self, gates: Tensors) -> Tensors:
        return self.inner.held(gates)

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the weights that layers read, by name: kernels become binary, then dropped entries become 0.

        This order matters, because no binary weight is 0.
        """
        read = {name: self._binary(w) if name in self.kernels else w for name, w in weights.items()}
        return self.inner.effective(read, gates, noise, training=training)

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        return self.inner.descent(grads, weights, gates)

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        return self.inner.confine(new, old, gates)

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        return self.inner.pack(weights, gates)

    def keep_idle(self, moved: Tensors, before: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        return self.inner.keep_idle(moved, before, noise)

    def _binary(self, weight: Tensor) -> Tensor:
        made: Tensor = _BinarizeWeights.apply(weight, self.clip)  # type: ignore[no-untyped-call]
        return made


class _BinarizeWeights(torch.autograd.Function):
    """Function mean|W| sign(W) of a kernel W, with a straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, clip: bool) -> Tensor:
        size = weight.abs().mean()
        return torch.where(weight >= 0, size, -size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, ctx.clip = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return torch.where(weight.abs() <= 1, gradient, torch.zeros(())) if ctx.clip else gradient, None
