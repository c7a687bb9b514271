"""CNNs of the FAFED paper (fafed.md 4.1), as federations name them: ``package.module:factory``."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import ACTIVATIONS, Activation, Dense, chain

FASHION_CNN, MNIST_CNN, CIFAR_CNN = (f"{__name__}:fafed_{name}" for name in ("fashion", "mnist", "cifar"))


class ConvActPool(nn.Module):
    """Convolution of stride 1 with bias, activation, 2x2 max pool that drops an odd last row and column."""

    def __init__(self, inside: int, width: int, kernel: int, padding: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.conv = nn.Conv2d(inside, width, kernel, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(ACTIVATIONS[self.activation](self.conv(x)), 2)


Shape = tuple[str, int, int, tuple[int, ...], tuple[int, ...], Activation]
"""Name, kernel, padding, widths of the convolutions and of the hidden dense layers, activation."""


def _cnn(
    shape: Shape, *, in_channels: int = 1, size: int = 28, classes: int = 10, final_activation: bool = False,
    initial: Initial = "torch", seed: int = 0,
) -> ModelSpec:  # fmt: skip
    """Return a CNN of the paper.

    ``final_activation`` puts the activation that the paper lists behind the logits too. Tanh keeps the cross-entropy of ten
    classes above 0.7966, and ReLU lets outputs die (fafed.md 8.12).
    """
    name, kernel, padding, convolutions, hidden, activation = shape
    side = size
    for _ in convolutions:
        side = (side + 2 * padding - kernel + 1) // 2
    if side < 1:
        raise ModelError(
            f"{name} leaves nothing of images {size} wide behind its pools: take larger ones", size=size
        )

    def units() -> nn.Sequential:
        layer = partial(ConvActPool, kernel=kernel, padding=padding, activation=activation)
        dense = chain("dense", partial(Dense, activation=activation), (convolutions[-1] * side**2, *hidden))
        head = Dense(hidden[-1], classes, activation if final_activation else None)
        return sequential([*chain("conv", layer, (in_channels, *convolutions)), *dense, ("head", head)])

    sample = TensorSpec((in_channels, size, size))
    return ModelSpec(name, initialize(units, seed, initial), sample, classes)


fafed_mnist = partial(_cnn, ("fafed_mnist", 5, 0, (20, 50), (500,), "relu"))
"""CNN for MNIST: 431,080 parameters for 1x28x28."""
fafed_fashion = partial(_cnn, ("fafed_fashion", 3, 0, (5, 10), (100,), "tanh"))
"""CNN for Fashion-MNIST: 26,620 parameters for 1x28x28."""
fafed_cifar = partial(_cnn, ("fafed_cifar", 3, 1, (16, 32, 64), (512, 64), "relu"), in_channels=3, size=32)
"""CNN for CIFAR-10: 581,866 parameters for 3x32x32."""
