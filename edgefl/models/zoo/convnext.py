"""ConvNeXt (Liu et al. 2022): depthwise 7x7 convolutions, layer norm over channels, GELU, layer scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.spec import ModelSpec, sequential

EPS = 1e-6


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (B, C, H, W), at each position."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """One learned factor per channel of the last dimension, with the initial value ``first``."""

    def __init__(self, channels: int, first: float) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def fill(self, generator: torch.Generator) -> None:
        """Set the initial value, without drawing."""
        self.weight.fill_(self.first)


class Block(nn.Module):
    """x + scale * dense(GELU(dense(norm(depthwise(x))))); the dense layers work on (B, H, W, C)."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.scale = Scale(width, scale)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.scale(self.outer(F.gelu(self.inner(out))))
        residual: Tensor = out.permute(0, 3, 1, 2)
        return x + residual


class Stem(nn.Module):
    """Patches by a strided convolution, layer norm."""

    def __init__(self, in_channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.norm = ChannelNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


class Down(nn.Module):
    """Layer norm, then 2x2 convolution of stride 2."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(inside)
        self.conv = nn.Conv2d(inside, width, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x))
        return out


class Head(nn.Module):
    """Global average pool, layer norm, dense layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.dense = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.norm(x.mean(dim=(2, 3))))
        return logits


def convnext(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    patch: int = 2,
    widths: Sequence[int] = (40, 80, 160, 320),
    depths: Sequence[int] = (2, 2, 6, 2),
    scale: float = 0.1,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return ConvNeXt: stem, blocks in stages with a down-sampling unit between them, head.

    The defaults have the widths and depths of the Atto size, with 2x2 patches for 32x32 images. ConvNeXt-T is ``size=224,
    patch=4, widths=(96, 192, 384, 768), depths=(3, 3, 9, 3), classes=1000`` (28,589,128 parameters). ``scale`` is
    the first value of the layer scale: the original's 1e-6 suits long training with warm-up, 0.1 a few rounds.
    No stochastic depth.
    """
    if len(widths) != len(depths):
        raise ModelError(
            f"a width and a depth per stage, found {widths} and {depths}", widths=widths, depths=depths
        )

    def units() -> nn.Sequential:
        layers: list[tuple[str, nn.Module]] = [("stem", Stem(in_channels, widths[0], patch))]
        blocks = 0
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            if stage > 1:
                layers.append((f"down{stage}", Down(widths[stage - 2], width)))
            layers += [(f"block{blocks + number}", Block(width, scale)) for number in range(1, depth + 1)]
            blocks += depth
        return sequential([*layers, ("head", Head(widths[-1], classes))])

    return ModelSpec(
        "convnext", initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes
    )
