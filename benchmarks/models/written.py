"""Models as people write them, without a thought of federations: the suite's plain code."""
# A call of a module is Any, and people return it as it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Tagger(nn.Module):
    """A tag for each word, by a bidirectional LSTM."""

    def __init__(self, words: int, tags: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.fc = nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.fc(self.dropout(out))


class GruClassifier(nn.Module):
    """A class by the last state of a GRU over a sensor's readings."""

    def __init__(self, channels: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, hidden, num_layers=2, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)
        )

    def forward(self, series: Tensor) -> Tensor:
        _, state = self.gru(series)
        return self.head(state[-1])


class TemporalBlock(nn.Module):
    """Two causal convolutions with dilation, beside a skip connection."""

    def __init__(self, inside: int, width: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inside, width, 3, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.downsample = nn.Conv1d(inside, width, 1) if inside != width else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(F.relu(self.conv1(F.pad(x, (self.padding, 0)))), 0.2, self.training)
        out = F.dropout(F.relu(self.conv2(F.pad(out, (self.padding, 0)))), 0.2, self.training)
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    """A temporal convolutional network; samples are (time, channels)."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(TemporalBlock(channels if level == 0 else width, width, 2**level) for level in range(3))
        )
        self.fc = nn.Linear(width, classes)

    def forward(self, series: Tensor) -> Tensor:
        return self.fc(self.blocks(series.transpose(1, 2))[:, :, -1])


class UNet(nn.Module):
    """Classes of pixels: down, up, and skip connections."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._double(3, width), self._double(width, 2 * width)
        self.bottom = self._double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.dec2 = self._double(4 * width, 2 * width)
        self.up1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.dec1 = self._double(3 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inside: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        x = self.bottom(F.max_pool2d(d2, 2))
        x = self.dec2(torch.cat([self.up2(x), d2], dim=1))
        return self.out(self.dec1(torch.cat([self.up1(x), d1], dim=1)))


class VAE(nn.Module):
    """A variational autoencoder: the picture again, and the mean and the variance that it was drawn by."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.mu, self.logvar = nn.Linear(1024, latent), nn.Linear(1024, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 1024),
            nn.Unflatten(1, (16, 8, 8)),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not self.training:
            return mu
        return mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).view(x.size(0), -1)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


class DLRM(nn.Module):
    """Click prediction: numbers, and a bag of categories for each of a few features, that interact by their products."""

    pairs: Tensor

    def __init__(self, numbers: int, categories: int, features: int, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(numbers, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.bags = nn.ModuleList([nn.EmbeddingBag(categories, width, mode="sum") for _ in range(features)])
        pairs = (features + 1) * features // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        rows, columns = torch.tril_indices(features + 1, features + 1, offset=-1)
        self.register_buffer("pairs", rows * (features + 1) + columns)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x] + [bag(sparse[:, k]) for k, bag in enumerate(self.bags)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([x, products], dim=1))


class Siamese(nn.Module):
    """Classifier of equal pictures, by one encoder for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(16),
        )
        self.encoder(torch.zeros(1, 1, 16, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.abs(self.encoder(left) - self.encoder(right)))


class TwoTower(nn.Module):
    """A rating: the product of a user's vector and an item's, and how kind the one and how good the other is."""

    def __init__(self, users: int, items: int, width: int = 8) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.user_tower = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.item_tower = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u = F.normalize(self.user_tower(self.user(user)), dim=-1)
        i = F.normalize(self.item_tower(self.item(item)), dim=-1)
        return (u * i).sum(-1, keepdim=True) + self.user_bias(user) + self.item_bias(item)


class DSCNN(nn.Sequential):
    """Keyword spotting: depthwise separable convolutions over a spectrogram (1, time, mel)."""

    def __init__(self, classes: int, width: int = 16, blocks: int = 3) -> None:
        def block() -> list[nn.Module]:
            return [
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]

        stem = [
            nn.Conv2d(1, width, (10, 4), stride=2, padding=(5, 1), bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        body = [layer for _ in range(blocks) for layer in block()]
        super().__init__(
            *stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, classes)
        )


class PositionalEncoding(nn.Module):
    """Sines and cosines, as in torch's tutorial."""

    table: Tensor

    def __init__(self, width: int, longest: int = 64) -> None:
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(1, longest, width)
        table[0, :, 0::2], table[0, :, 1::2] = torch.sin(position * rates), torch.cos(position * rates)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.size(1)]


class TextTransformer(nn.Module):
    """torch's own encoder with a mask for padding, which token 0 is."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.encoder(self.position(self.embedding(tokens)), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).float()
        return self.fc((x * kept).sum(1) / kept.sum(1).clamp(min=1))


class KimCNN(nn.Module):
    """Convolutions of several widths over words, and the strongest answer of each."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, (size, width)) for size in (2, 3, 4)])
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(24, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).unsqueeze(1)
        maps = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        pooled = [F.max_pool1d(each, each.size(2)).squeeze(2) for each in maps]
        return self.fc(self.dropout(torch.cat(pooled, 1)))


class GCN(nn.Module):
    """A graph's class: features of its nodes, mixed with those of their neighbours."""

    def __init__(self, features: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(features, width), nn.Linear(width, width)
        self.fc = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        edges = adjacency.float() + torch.eye(adjacency.size(-1))
        scale = edges.sum(-1).rsqrt()
        edges = scale.unsqueeze(-1) * edges * scale.unsqueeze(-2)
        x = F.relu(edges @ self.layer1(nodes))
        x = F.relu(edges @ self.layer2(x))
        return self.fc(x.mean(dim=1))


class CRNN(nn.Module):
    """A line of text: convolutions, then an LSTM along its width; symbols for CTC."""

    def __init__(self, symbols: int, width: int = 16) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, width, 3, padding=1),
            nn.ReLU(),
        )
        self.rnn = nn.LSTM(4 * width, width, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        x = self.cnn(x).permute(0, 3, 1, 2).reshape(b, -1, 64)
        return self.fc(self.rnn(x)[0])


class VideoCNN(nn.Module):
    """A gesture: convolutions over time, height and width."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv3d(3, width, 3, padding=1), nn.BatchNorm3d(width)
        self.conv2, self.bn2 = nn.Conv3d(width, 2 * width, 3, padding=1), nn.BatchNorm3d(2 * width)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.adaptive_avg_pool3d(F.relu(self.bn2(self.conv2(x))), 1)
        return self.fc(x.flatten(1))
