"""The image model of the reduced scale: a ResNet-8 that sees a quarter of the pixels (fiarse.md 9.2, tier 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.resnet import resnet8


def small_resnet(*, in_channels: int = 1, size: int = 28, **options: Any) -> ModelSpec:
    """Return resnet8 behind a mean over 2 x 2 pixels: the same parameters at a quarter of the computing."""
    inner = resnet8(in_channels=in_channels, size=size // 2, **options)
    module = sequential([("pool", nn.AvgPool2d(2)), *inner.module.named_children()])
    return replace(inner, name="small_resnet", module=module, sample=TensorSpec((in_channels, size, size)))
