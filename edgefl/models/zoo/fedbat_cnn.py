"""The CNN of the FedBAT paper for small images (fedbat.md 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.explicit import BnMode
from edgefl.models.layers.initial import initialised
from edgefl.models.layers.norms import GROUPS, MakeNorm, NormKind, make_norm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import Dense, chain

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
    bn_keep: float = 0.9,
    groups: int = GROUPS,
    seed: int = 0,
) -> ModelSpec:
    """FedBAT's CNN: units ``conv1`` ... ``conv4`` and ``head``; 390,890 parameters for 1x28x28, 399,146 for 3x32x32.

    ModelError if ``size`` is too small for a pool behind each convolution.
    """
    side = size >> len(widths)
    if side < 1:
        raise ModelError(
            f"fedbat_cnn halves images {len(widths)} times, so they are at least {1 << len(widths)} wide, found {size}: "
            "take larger images, or fewer widths",
            size=size,
        )
    layer = make_norm(norm, mode=bn, keep=bn_keep, groups=groups)

    def units() -> nn.Sequential:
        inner = [in_channels, *widths]
        convolutions = chain("conv", partial(ConvNormPool, norm=layer), inner)
        head = Dense(inner[-1] * side * side, classes, None)
        return sequential([*convolutions, ("head", head)])

    return ModelSpec("fedbat_cnn", initialised(units, seed), TensorSpec((in_channels, size, size)), classes)
