"""Small models whose channels hang together in many ways, and how to draw inputs and values for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses import SequenceCrossEntropy
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from tests.models import plain

IMAGE = TensorSpec((3, 8, 8))
WORDS = TensorSpec((10,), torch.int64, 20)


class Dense(nn.Module):
    """DenseNet: every layer reads all that came before, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(6 + 4 * n, 4, 3, padding=1) for n in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * n) for n in range(3))
        self.head = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found.append(layer(torch.relu(norm(torch.cat(found, dim=1)))))
        return self.head(torch.cat(found, dim=1).mean((2, 3)))


class Grouped(nn.Module):
    """Group norm, a grouped convolution, an instance norm without tensors, squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.groups = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.instance = nn.GroupNorm(12, 12)
        self.squeeze, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.groups(torch.relu(self.norm(self.first(x)))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return self.head((x * gate[:, :, None, None]).mean((2, 3)))


class Shuffled(nn.Module):
    """ShuffleNet: two halves of the channels, one of them convolved, then shuffled with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.last = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, dim=1)
        x = torch.stack((left, torch.relu(self.deep(right))), dim=2).flatten(1, 2)
        return self.head(torch.tanh(self.last(x)).mean((2, 3)))


class Encoder(nn.Module):
    """Torch's own transformer layer behind a convolution that a transposed one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 2, stride=2)
        self.up = nn.ConvTranspose2d(6, 8, 2, stride=2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.up(torch.relu(self.down(x))), 2)
        return self.head(self.layer(x.flatten(2).transpose(1, 2)).mean(1))


class HeadSized(nn.Module):
    """Attention whose code knows the size of a head, not the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.q, self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(8, 12)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(2).transpose(1, 2)))
        q, k, v = (
            layer(x).reshape(x.shape[0], x.shape[1], -1, 3).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(mixed).mean(1)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.gru = nn.GRU(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.gru(self.words(ids))
        return self.head(self.norm(out)[:, -1])


class Elman(nn.Module):
    """Torch's plain recurrent layer, which works step by step and transposes in place; gated words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 12), nn.RNN(6, 4, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(F.glu(self.words(ids), dim=2))[0][:, -1])


class Uneven(nn.Module):
    """Branches of 4 and 6 channels side by side, normed in two groups of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.norm, self.deep = nn.GroupNorm(2, 10), nn.Conv2d(10, 10, 3, groups=10)
        self.head = nn.Linear(90, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(torch.cat((self.left(x), self.right(x)), dim=1)))
        return self.head(F.max_pool2d(self.deep(x), 2).flatten(1))


class Grey(nn.Module):
    """A grey image made three of, for a first layer that wants colours; a token whose batch size is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.token = nn.Conv2d(3, 6, 3), nn.Parameter(torch.zeros(1, 1, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.mean(1, keepdim=True).expand(-1, 3, -1, -1)))
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)), dim=1)
        return self.head(x.mean(1))


class Written(nn.Module):
    """A size that the code holds as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x.flatten(1))).reshape(-1, 6))


class Kept(nn.Module):
    """Sizes that the code keeps in attributes; heads and entries of the attention are known by number."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.width, self.heads, self.entries = width, heads, width // heads
        self.first, self.qkv = nn.Linear(3, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(2).transpose(1, 2))
        parts = self.qkv(x).split(self.width, dim=2)
        q, k, v = (part.view(-1, 64, self.heads, self.entries).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.head((x + self.out(mixed.reshape(-1, 64, self.width))).mean(1))


class Sorted(nn.Module):
    """An operation that no rule speaks of, on the only channels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sort(self.first(x.flatten(1)), dim=1)[0])


def whole(module: nn.Module, sample: TensorSpec = IMAGE, classes: int = 5) -> ModelSpec:
    """A model of one unit, which runs the code as its author wrote it."""
    return ModelSpec(type(module).__name__, sequential([("all", module)]), sample, classes)


def _plain(make: Callable[[], nn.Module], sample: TensorSpec = IMAGE) -> ModelSpec:
    words = make is plain.LanguageModel
    loss = SequenceCrossEntropy() if words else None
    return split(make(), sample=sample, classes=20 if words else 5, name=make.__name__, loss=loss)


_SMALL: Mapping[str, Mapping[str, object]] = {
    "bert": {"length": 6, "vocabulary": 20, "width": 12, "depth": 2, "rate": 0.0},
    "bilstm": {"length": 6, "vocabulary": 20, "features": 6, "hidden": 4, "rate": 0.0},
    "cnn": {"size": 8, "classes": 5},
    "convnext": {"size": 16, "widths": (4, 6, 8, 10), "depths": (1, 1, 2, 1)},
    "lstm_lm": {"length": 5, "vocabulary": 20, "features": 6, "hidden": 4, "rate": 0.0},
    "mlp": {"size": 6, "hidden": (9, 7)},
    "mobilenet": {"size": 16, "width": 0.1},
    "resnet18": {"size": 16, "widths": (4, 6, 8, 10)},
    "resnet20": {"size": 12, "widths": (4, 6, 8)},
    "resnet8": {"size": 12, "widths": (4, 6, 8)},
    "vit": {"size": 8, "width": 12, "depth": 2},
}
ZOO = tuple(_SMALL)
_OTHERS: Mapping[str, Callable[[], ModelSpec]] = {
    **{
        kind.__name__: lambda kind=kind: _plain(kind)
        for kind in (
            plain.ResNet, plain.MobileNet, plain.Vit, plain.ConvNext, plain.Branches, plain.Frozen, Dense, Grouped,
            Shuffled, Encoder, HeadSized, Uneven,
        )
    },
    **{kind.__name__: lambda kind=kind: _plain(kind, WORDS) for kind in (plain.Bert, plain.BiLstm, Gru, Elman)},
    "LanguageModel": lambda: _plain(plain.LanguageModel, WORDS),
    "Bare": lambda: _plain(plain.Bare, TensorSpec((3, 2, 2))),
}  # fmt: skip
MODELS = (*ZOO, *_OTHERS)


def model(name: str) -> ModelSpec:
    """A small model, its values away from their initial ones; a fresh copy each time."""
    made = _made(name)
    return replace(made, module=copy.deepcopy(made.module))


@cache
def _made(name: str) -> ModelSpec:
    torch.manual_seed(0)
    spec = build_model(name, **_SMALL[name]) if name in _SMALL else _OTHERS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in spec.module.state_dict().items():
            if key.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return spec


def rows(sample: TensorSpec, count: int = 4) -> Tensor:
    """Random rows of a model's input."""
    generator = torch.Generator().manual_seed(2)
    if sample.below is not None:
        return torch.randint(0, sample.below, (count, *sample.shape), generator=generator)
    return torch.randn((count, *sample.shape), generator=generator)
