"""The multi-layer perceptron of the Per-FedAvg paper (per_fedavg.md 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.initial import initialised
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import chain

HIDDEN = (80, 60)


class NormalLinear(nn.Linear):
    """A dense layer that begins with W ~ N(0, 1 / inputs) and zero biases."""

    def fill(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.in_features**-0.5, generator=generator)
        self.bias.zero_()


class EluDense(nn.Module):
    """Flatten, dense layer with bias, and ELU of slope 1 where ``activate``: (B, ...) -> (B, width)."""

    def __init__(self, inside: int, width: int, *, activate: bool) -> None:
        super().__init__()
        self.activate = activate
        self.dense = NormalLinear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x.flatten(1))
        return F.elu(out) if self.activate else out


def elu_mlp(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    hidden: Sequence[int] = HIDDEN,
    seed: int = 0,
) -> ModelSpec:
    """Per-FedAvg's MLP: units ``dense1``, ``dense2``, ``head``; 68,270 parameters for 1x28x28, 251,310 for 3x32x32."""
    widths = [in_channels * size * size, *hidden]

    def units() -> nn.Sequential:
        layers = chain("dense", partial(EluDense, activate=True), widths)
        return sequential([*layers, ("head", EluDense(widths[-1], classes, activate=False))])

    return ModelSpec("elu_mlp", initialised(units, seed), TensorSpec((in_channels, size, size)), classes)
