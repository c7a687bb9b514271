"""A small DS-CNN (Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017): depthwise separable convolutions
over log-mel features (1, mels, frames)."""

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Separable(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = convolution(channels, channels, 3, groups=channels)
        self.pointwise = convolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(x))


class DSCNN(nn.Module):
    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.stem = convolution(1, channels, 5, stride=2)
        self.blocks = nn.ModuleList(Separable(channels) for _ in range(4))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem((x + 1) / 2.5)  # log-mel features of speech lie between -14 and 8
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def make(classes: int = 8, channels: int = 32) -> nn.Module:
    return DSCNN(classes, channels)  # six units: stem, blocks_0, ..., blocks_3, head
