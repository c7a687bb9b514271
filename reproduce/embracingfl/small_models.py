"""Models of the reduced configuration (embracingfl.md 9.2), as federations name them: ``package.module:factory``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.norms import BnMode
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.resnet import WIDTHS, resnet8

MODULE = __name__
POOLED = f"{MODULE}:pooled_resnet8"


class Pooled(nn.Module):
    """A unit that reads the means of ``pool`` x ``pool`` pixels: (B, C, H, W) -> unit of (B, C, H/pool, W/pool)."""

    def __init__(self, unit: nn.Module, pool: int) -> None:
        super().__init__()
        self.unit, self.pool = unit, pool

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.unit(F.avg_pool2d(x, self.pool))
        return out


def pooled_resnet8(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    pool: int = 2,
    widths: Sequence[int] = WIDTHS,
    bn: BnMode = "global",
    seed: int = 0,
) -> ModelSpec:
    """ResNet-8 on images that its stem pools first; 78,330 parameters for 3 channels and the default widths."""
    made = resnet8(
        in_channels=in_channels, size=size // pool, classes=classes, widths=widths, bn=bn, seed=seed
    )
    units = list(made.module.named_children())
    first, stem = units[0]
    module = sequential([(first, Pooled(stem, pool)), *units[1:]])
    return ModelSpec("pooled resnet8", module, TensorSpec((in_channels, size, size)), classes)
