"""CNNs of the FAFED paper (fafed.md 4.1) for small images, as federations name them: ``package.module:factory``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import initialize
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import ACTIVATIONS, Activation, Dense, chain

FASHION_CNN = f"{__name__}:fafed_fashion"


class ConvActPool(nn.Module):
    """Convolution of stride 1 with bias, activation, 2x2 max pool that drops an odd last row and column."""

    def __init__(self, inside: int, width: int, kernel: int, padding: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.conv = nn.Conv2d(inside, width, kernel, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(ACTIVATIONS[self.activation](self.conv(x)), 2)


@dataclass(frozen=True)
class Shape:
    """A CNN of the paper: widths of its convolutions and of its hidden dense layers."""

    name: str
    kernel: int
    padding: int
    convolutions: Sequence[int]
    dense: Sequence[int]
    activation: Activation

    def side(self, size: int) -> int:
        """Return the width of the maps behind the last pool; raise ModelError if an image of ``size`` is too small."""
        side = size
        for _ in self.convolutions:
            side = (side + 2 * self.padding - self.kernel + 1) // 2
        if side < 1:
            raise ModelError(
                f"{self.name} has {len(self.convolutions)} convolutions with a pool behind each, which leave nothing of "
                f"images {size} wide: take larger ones",
                size=size,
            )
        return side


MNIST = Shape("fafed_mnist", 5, 0, (20, 50), (500,), "relu")
FASHION = Shape("fafed_fashion", 3, 0, (5, 10), (100,), "tanh")
CIFAR = Shape("fafed_cifar", 3, 1, (16, 32, 64), (512, 64), "relu")


def fafed_mnist(
    *, in_channels: int = 1, size: int = 28, classes: int = 10, final_activation: bool = False, seed: int = 0
) -> ModelSpec:
    """Return FAFED's CNN for MNIST: 431,080 parameters for 1x28x28.

    ``final_activation`` puts the ReLU that the paper lists behind the logits too; its dead outputs harm (fafed.md 8.12).
    """
    return _build(MNIST, in_channels, size, classes, final_activation, seed)


def fafed_fashion(
    *, in_channels: int = 1, size: int = 28, classes: int = 10, final_activation: bool = False, seed: int = 0
) -> ModelSpec:
    """Return FAFED's CNN for Fashion-MNIST: 26,620 parameters for 1x28x28.

    ``final_activation`` puts the Tanh that the paper lists behind the logits too, which keeps the cross-entropy of ten
    classes above 0.7966 (fafed.md 8.12).
    """
    return _build(FASHION, in_channels, size, classes, final_activation, seed)


def fafed_cifar(
    *, in_channels: int = 3, size: int = 32, classes: int = 10, final_activation: bool = False, seed: int = 0
) -> ModelSpec:
    """Return FAFED's CNN for CIFAR-10: 581,866 parameters for 3x32x32; ``final_activation`` as in :func:`fafed_mnist`."""
    return _build(CIFAR, in_channels, size, classes, final_activation, seed)


def _build(shape: Shape, channels: int, size: int, classes: int, final: bool, seed: int) -> ModelSpec:
    flat = shape.convolutions[-1] * shape.side(size) ** 2

    def units() -> nn.Sequential:
        convolution = partial(
            ConvActPool, kernel=shape.kernel, padding=shape.padding, activation=shape.activation
        )
        convolutions = chain("conv", convolution, (channels, *shape.convolutions))
        dense = chain("dense", partial(Dense, activation=shape.activation), (flat, *shape.dense))
        head = Dense(shape.dense[-1], classes, shape.activation if final else None)
        return sequential([*convolutions, *dense, ("head", head)])

    return ModelSpec(shape.name, initialize(units, seed), TensorSpec((channels, size, size)), classes)
