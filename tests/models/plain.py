"""Small models as people write them: one plain module, whose forward knows nothing of units."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions beside a skip connection, with a projection where ``inside != width``."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(inside, width, 1) if inside != width else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.skip is None else self.skip(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += kept
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.layer = nn.Sequential(Residual(4, 4), Residual(4, 6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        x = self.layer(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Inverted(nn.Module):
    """MobileNetV2's block; only the one that keeps its width has a skip connection."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(inside, 2 * inside, 1), nn.BatchNorm2d(2 * inside), nn.ReLU6())
        self.depthwise = nn.Conv2d(2 * inside, 2 * inside, 3, padding=1, groups=2 * inside)
        self.narrow = nn.Conv2d(2 * inside, width, 1)
        self.has_skip = inside == width

    def forward(self, x: Tensor) -> Tensor:
        out = self.narrow(F.relu6(self.depthwise(self.wide(x))))
        return x + out if self.has_skip else out


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), Inverted(4, 6), Inverted(6, 6))
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class EncoderLayer(nn.Module):
    """Post-norm attention and feed-forward; the padding mask is an argument, dropout a function."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.norm1(x + F.dropout(mixed, self.rate, self.training))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Words, positions and segments summed; a mask of ones; two layers; the first position is classified."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 8), nn.Embedding(10, 8)
        self.segments = nn.Embedding(2, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(EncoderLayer(8, 2, rate) for _ in range(2))
        self.pooler = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 5)
        self.register_buffer("numbers", torch.arange(10))

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=ids.device)
        segments = torch.zeros_like(ids)
        x = self.words(ids) + self.positions(self.numbers[:length]) + self.segments(segments)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(EncoderLayer(8, 2, 0.0) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class BiLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(ids))
        return self.head(torch.cat((last[0], last[1]), dim=1))


class LanguageModel(nn.Module):
    """Next words: logits at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.decoder = nn.Linear(4, 20)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(ids))
        return self.decoder(out)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.mix(x).permute(0, 2, 3, 1))
        out = self.gain * self.down(F.gelu(self.up(out)))
        return x + out.permute(0, 3, 1, 2)


class Stage(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(inside, width, 2, stride=2)
        self.blocks = nn.Sequential(ConvNextBlock(width), ConvNextBlock(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.shrink(x))


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(3, 4), Stage(4, 6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """Two branches that are concatenated, and an auxiliary path around the second pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.left, self.right = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 3, 1)
        self.mix = nn.Conv2d(5, 4, 1)
        self.gate = nn.Parameter(torch.ones(4, 6, 6))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.cat((self.left(x), self.right(x)), dim=1)
        x = (self.mix(x) * self.gate).mean((2, 3))
        return self.head(torch.cat((x, self.second(torch.relu(self.first(x)))), dim=1))


class Bare(nn.Module):
    """No submodules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(12, 7)), nn.Parameter(torch.zeros(7))
        self.w2 = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x.reshape(x.shape[0], -1) @ self.w1 + self.b1)
        return hidden @ self.w2


class Dropping(nn.Module):
    """A layer and a function that drops behind it, in a submodule if ``deep``."""

    def __init__(self, inside: int, width: int, *, deep: bool = False, rate: float = 0.25) -> None:
        super().__init__()
        self.layer = Dropping(inside, width, rate=rate) if deep else nn.Linear(inside, width)
        self.rate = 0.0 if deep else rate

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.layer(x)), self.rate, self.training)


class Frozen(nn.Module):
    """Fine-tuned as people do: the first norm keeps its statistics, the second moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.kept = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.next, self.moved = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        nn.init.uniform_(self.kept.running_mean)
        nn.init.uniform_(self.kept.running_var, 0.5, 2.0)
        self.kept.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.kept(self.conv(x)))
        return self.head(torch.relu(self.moved(self.next(x))).mean((2, 3)))
