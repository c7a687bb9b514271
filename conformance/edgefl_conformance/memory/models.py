"""Plain PyTorch modules that no tier or preset of this repository was tuned for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.algorithms.catalog import SGD, TCBGD
from edgefl.api.model import model_spec
from edgefl.api.training import Training
from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.objective.carrier import ThresholdCarrier
from edgefl.submodels.submodel import Submodel

_BNECK = (
    # kernel, expanded, out, squeeze-excite, hard-swish, stride: MobileNetV3-small (Howard et al., 2019, table 2)
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)
TOKENS = 512


class SqueezeExcite(nn.Module):
    """Channel attention of MobileNetV3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(8, channels // 4 // 8 * 8)
        self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.relu(self.down(x.mean((2, 3), keepdim=True)))
        return x * nn.functional.hardsigmoid(self.up(scale))


class InvertedResidual(nn.Module):
    """Block of MobileNetV3: expand, depthwise convolution, squeeze-excite, project."""

    def __init__(
        self, inside: int, kernel: int, expanded: int, out: int, attends: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        activation: type[nn.Module] = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = []
        if expanded != inside:
            layers += [nn.Conv2d(inside, expanded, 1, bias=False), nn.BatchNorm2d(expanded), activation()]
        layers += [
            nn.Conv2d(expanded, expanded, kernel, stride, kernel // 2, groups=expanded, bias=False),
            nn.BatchNorm2d(expanded),
            activation(),
            *([SqueezeExcite(expanded)] if attends else []),
            nn.Conv2d(expanded, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inside == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.is_residual else y


class MobileNetV3Small(nn.Module):
    """MobileNetV3-small as torchvision builds it, without its dropout."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        blocks, inside = [], 16
        for kernel, expanded, out, attends, hard, stride in _BNECK:
            blocks.append(InvertedResidual(inside, kernel, expanded, out, attends, hard, stride))
            inside = out
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.Conv2d(96, 576, 1, bias=False), nn.BatchNorm2d(576), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, classes))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))
        return y


class SeriesCnn(nn.Module):
    """Convolutions with batch norm over a time series of six channels, as of an accelerometer and a gyroscope."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, out in ((6, 32), (32, 64), (64, 128)):
            layers += [nn.Conv1d(inside, out, 5, padding=2), nn.BatchNorm1d(out), nn.ReLU(), nn.MaxPool1d(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x).mean(2))
        return y


class KeywordGru(nn.Module):
    """GRU over the frames of a log-mel spectrogram."""

    def __init__(self, classes: int = 12) -> None:
        super().__init__()
        self.gru = nn.GRU(40, 96, batch_first=True)
        self.head = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x.squeeze(1).transpose(1, 2))
        y: Tensor = self.head(states[:, -1])
        return y


class EncoderLayer(nn.Module):
    """Layer of BERT: attention and a feed-forward network, each behind a sum with its input and a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        y: Tensor = self.last_norm(x + self.inner(x))
        return y


class SmallBert(nn.Module):
    """Two layers of BERT over 32 tokens."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 128), nn.Embedding(32, 128)
        self.layers = nn.Sequential(EncoderLayer(128, 4), EncoderLayer(128, 4))
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.tokens(x) + self.places.weight).mean(1))
        return y


class BasicBlock(nn.Module):
    """Residual block of ResNet-18."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and inside == out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32x32 pixels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        blocks, inside = [], 64
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inside, out, stride), BasicBlock(out, out, 1)]
            inside = out
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return y


@dataclass(frozen=True)
class MeasuredModel:
    """A model to measure, with the shape of one sample and the rows of a step."""

    module: type[nn.Module]
    shape: tuple[int, ...]
    batch: int
    dtype: torch.dtype = torch.float32

    def made(self) -> nn.Module:
        """Return the module with its initial weights, which are the same in each process."""
        torch.manual_seed(0)
        return self.module()

    def spec(self) -> ModelSpec:
        """Return the module as a model of edgefl, with the shapes of its inputs and outputs."""
        module = self.made()
        found: Tensor = module(torch.zeros((2, *self.shape), dtype=self.dtype))
        return model_spec(module, sample=TensorSpec(self.shape, self.dtype), classes=found.shape[1])

    def training(self, submodel: Submodel) -> Training:
        """Return four steps of the training that suits a submodel."""
        made = TCBGD if isinstance(submodel.carrier, ThresholdCarrier) else SGD
        return Training(algorithm=made(batch=self.batch, steps=4))


SUBJECTS = {
    "mobilenet": MeasuredModel(MobileNetV3Small, (3, 64, 64), 8),
    "series": MeasuredModel(SeriesCnn, (6, 128), 16),
    "gru": MeasuredModel(KeywordGru, (1, 40, 100), 16),
    "bert": MeasuredModel(SmallBert, (32,), 8, torch.int64),
    "resnet18": MeasuredModel(ResNet18, (3, 32, 32), 8),
}
