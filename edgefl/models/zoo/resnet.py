"""ResNet-20 and its ResNet-8 sibling (embracingfl.md 3.1, 9.2), ResNet-10 (fedbat.md 4.1), and ResNet-18, for small images.

Basic blocks are indivisible units.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.layers.norms import GROUPS, BnMode, MakeNorm, NormKind, make_norm
from edgefl.models.spec import ModelSpec, sequential

WIDTHS = (16, 32, 64)
WIDTHS_10 = (32, 64, 128, 256)
WIDTHS_18 = (64, 128, 256, 512)


class Stem(nn.Module):
    """3x3 convolution, norm, ReLU."""

    def __init__(self, in_channels: int, width: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv = _conv3(in_channels, width, 1)
        self.bn = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Block(nn.Module):
    """conv-norm-ReLU-conv-norm plus the shortcut, then ReLU; the shortcut is a 1x1 projection where ``project``."""

    def __init__(self, inside: int, width: int, stride: int, project: bool, norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = _conv3(inside, width, stride)
        self.bn1 = norm(width)
        self.conv2 = _conv3(width, width, 1)
        self.bn2 = norm(width)
        self.shortcut = Projection(inside, width, stride, norm) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Projection(nn.Module):
    """1x1 convolution without bias, norm."""

    def __init__(self, inside: int, width: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 1, stride=stride, bias=False)
        self.bn = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.bn(self.conv(x))
        return projected


class Head(nn.Module):
    """Global average pool and a dense layer with bias."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.dense(x.mean(dim=(2, 3)))
        return logits


def resnet20(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: Sequence[int] = WIDTHS,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return ResNet-20: stem, 3 x 3 blocks, head; 272,762 trainable parameters at the defaults (embracingfl.md 3.1).

    The first block of *every* stage, stage 1 included, has a projection shortcut; that is what the paper's counts say.
    """
    layer = make_norm(norm, mode=bn, groups=groups)
    return _resnet("resnet20", 3, in_channels, size, classes, widths, layer, initial, seed)


def resnet8(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    widths: Sequence[int] = WIDTHS,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return ResNet-8: stem, one projection block per stage, head; 78,042 parameters for 28x28x1, 78,330 for 32x32x3."""
    layer = make_norm(norm, mode=bn, groups=groups)
    return _resnet("resnet8", 1, in_channels, size, classes, widths, layer, initial, seed)


def resnet10(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: Sequence[int] = WIDTHS_10,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return ResNet-10 of FedBAT: stem, one block per stage, head; 1,228,970 parameters, with 100 classes 1,252,100.

    Shortcuts are projections where a stage changes the shape, hence not in stage 1 (fedbat.md 4.1).
    """
    layer = make_norm(norm, mode=bn, groups=groups)
    return _resnet(
        "resnet10", 1, in_channels, size, classes, widths, layer, initial, seed, project_first=False
    )


def resnet18(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: Sequence[int] = WIDTHS_18,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return ResNet-18 for small images: 3x3 stem of stride 1 and no pooling behind it, 4 x 2 blocks; 11,173,962 parameters.

    Shortcuts are projections where a stage changes the shape, hence not in stage 1, as in the ImageNet original.
    """
    layer = make_norm(norm, mode=bn, groups=groups)
    return _resnet(
        "resnet18", 2, in_channels, size, classes, widths, layer, initial, seed, project_first=False
    )


def _resnet(
    name: str,
    blocks: int,
    in_channels: int,
    size: int,
    classes: int,
    widths: Sequence[int],
    norm: MakeNorm,
    initial: Initial,
    seed: int,
    *,
    project_first: bool = True,
) -> ModelSpec:
    """Return a ResNet of ``blocks`` per stage; ``project_first``: stage 1 begins with a projection too."""

    def units() -> nn.Sequential:
        inside = widths[0]
        layers: list[tuple[str, nn.Module]] = [("stem", Stem(in_channels, inside, norm))]
        for stage, width in enumerate(widths):
            for position in range(blocks):
                stride = 2 if position == 0 and stage > 0 else 1
                project = position == 0 and (stage > 0 or project_first)
                layers.append((f"block{len(layers)}", Block(inside, width, stride, project, norm)))
                inside = width
        return sequential([*layers, ("head", Head(inside, classes))])

    return ModelSpec(name, initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes)


def _conv3(inside: int, outside: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
