"""CNNs of the FAFED paper (fafed.md 4.1) and of the FedBAT paper (fedbat.md 4.1) for small images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import initialize
from edgefl.models.layers.norms import GROUPS, BnMode, MakeNorm, NormKind, make_norm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import ACTIVATIONS, Activation, Dense, chain


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


WIDTHS = (32, 64, 128, 256)


class ConvNormPool(nn.Module):
    """3x3 convolution of padding 1 without bias, norm, ReLU, 2x2 max pool: (B, I, H, W) -> (B, W', H//2, W//2)."""

    def __init__(self, inside: int, width: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 3, padding=1, bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


def fedbat_cnn(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    widths: Sequence[int] = WIDTHS,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    seed: int = 0,
) -> ModelSpec:
    """Return FedBAT's CNN: units ``conv1`` ... ``conv4`` and ``head``; 390,890 parameters for 1x28x28, 399,146 for 3x32x32.

    ModelError if ``size`` is too small for a pool behind each convolution.
    """
    side = size >> len(widths)
    if side < 1:
        raise ModelError(
            f"fedbat_cnn halves images {len(widths)} times, so they are at least {1 << len(widths)} wide, found {size}: "
            "take larger images, or fewer widths",
            size=size,
        )
    layer = make_norm(norm, mode=bn, groups=groups)

    def units() -> nn.Sequential:
        inner = [in_channels, *widths]
        convolutions = chain("conv", partial(ConvNormPool, norm=layer), inner)
        head = Dense(inner[-1] * side * side, classes, None)
        return sequential([*convolutions, ("head", head)])

    return ModelSpec("fedbat_cnn", initialize(units, seed), TensorSpec((in_channels, size, size)), classes)
