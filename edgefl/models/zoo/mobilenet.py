"""MobileNetV2 for small images: inverted residuals with depthwise convolutions and ReLU6."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.layers.norms import BatchNorm, BnMode
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.resnet import Head

# Expansion, channels, repetitions, stride: table 2 of Sandler et al. 2018, but stride 1 in the stem and in the stage
# of 24 channels, as is usual for 32x32 images.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, and ReLU6 if ``activate``."""

    def __init__(
        self,
        inside: int,
        outside: int,
        kernel: int,
        bn: partial[BatchNorm],
        *,
        stride: int = 1,
        groups: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.conv = nn.Conv2d(inside, outside, kernel, stride, padding, groups=groups, bias=False)
        self.bn = bn(outside)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return F.relu6(out) if self.activate else out


class Inverted(nn.Module):
    """1x1 expansion (absent where it is 1), 3x3 depthwise, 1x1 linear projection; plus the input if shapes agree."""

    def __init__(
        self, inside: int, outside: int, expansion: int, stride: int, bn: partial[BatchNorm]
    ) -> None:
        super().__init__()
        hidden = inside * expansion
        self.expand = ConvNorm(inside, hidden, 1, bn) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(hidden, hidden, 3, bn, stride=stride, groups=hidden)
        self.project = ConvNorm(hidden, outside, 1, bn, activate=False)
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + out if self.residual else out


def mobilenet(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    width: float = 1.0,
    bn: BnMode = "global",
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return MobileNetV2: stem, 17 inverted residuals, a 1x1 convolution, head; 2,236,682 parameters at the defaults.

    ``width`` multiplies all channels, rounded to multiples of 8, but never makes the last convolution narrower.
    With 1,000 classes the tensors equal the ImageNet original's (3,504,872 parameters).
    """
    norm = partial(BatchNorm, mode=bn)
    last = _round_channels(1280 * max(1.0, width))

    def units() -> nn.Sequential:
        inside = _round_channels(32 * width)
        layers: list[tuple[str, nn.Module]] = [("stem", ConvNorm(in_channels, inside, 3, norm))]
        for expansion, channels, repetitions, first in STAGES:
            outside = _round_channels(channels * width)
            for position in range(repetitions):
                stride = first if position == 0 else 1
                layers.append((f"block{len(layers)}", Inverted(inside, outside, expansion, stride, norm)))
                inside = outside
        return sequential([*layers, ("last", ConvNorm(inside, last, 1, norm)), ("head", Head(last, classes))])

    return ModelSpec(
        "mobilenet", initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes
    )


def _round_channels(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8, and not more than a tenth below ``channels``."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest
