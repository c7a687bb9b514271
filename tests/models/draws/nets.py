"""Small models that draw random numbers in the ways in which people's models do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec

ROWS = TensorSpec((5, 6))


class Head(nn.Module):
    """RoBERTa's: one dropout, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(6, 6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(x[:, 0])))))


class Plain(nn.Module):
    """One dropout for all layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.first(x.flatten(1))))
        return self.last(self.dropout(F.relu(self.second(x))))


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    if not training or rate == 0.0:
        return x
    kept = (
        1 - rate + torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
    ).floor_()
    return x.div(1 - rate) * kept


class Attention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention that drops in its kernel, and stochastic depth in the block's own forward."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm, self.attention, self.dense = nn.LayerNorm(6), Attention(0.3), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.linspace(0, 1, 6)  # without a device, as people write who have one
        x = x + drop_path(self.attention(self.norm(x)), self.rate, self.training)
        return x + drop_path(F.dropout(self.dense(x), 0.2, self.training), self.rate, self.training)


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, 0.3, self.training)


class Shared(nn.Module):
    """One module that draws, without weights, called between all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.first(x.flatten(1))))
        return self.last(self.drop(F.relu(self.second(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate) for rate in (0.0, 0.3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Albert(nn.Module):
    """One block for all layers: its weights act twice, its draws are others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.head = Repeated(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(x)[:, 0])


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Encoder(nn.Module):
    """torch's encoder with the dropout that it has by default, in its attention too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Sampled(nn.Module):
    """A variational bottleneck: sampled in training, its mean in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        if not self.training:
            return mean
        deviation = torch.exp(0.5 * self.scale(x))
        return mean + deviation * torch.randn_like(deviation)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.code, self.head = nn.Linear(6, 6), Sampled(), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.code(torch.tanh(self.inside(x[:, 0]))))


class Noisy(nn.Module):
    """Its own forward draws, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(6, 5, num_layers=2, dropout=0.4, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def layers() -> nn.Module:
    """Layers of torch that draw, each in a way of its own, and a plain list of them."""
    return nn.Sequential(
        nn.Conv1d(5, 4, 1), nn.Dropout1d(0.4), nn.RReLU(), nn.Flatten(), nn.Linear(24, 6), nn.SELU(), nn.AlphaDropout(0.4),
        nn.Linear(6, 4),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...]]] = {
    "a head that drops twice": (lambda: nn.Sequential(nn.Linear(6, 6), Head()), 2, ("0", "1")),
    "one dropout of the root": (Plain, 2, ("first", "second", "last")),
    "one module that draws": (Shared, 2, ("first", "second", "last")),
    "blocks": (Transformer, 6, ("blocks_0", "blocks_1", "head")),
    "a block of all layers": (Albert, 8, ("stack", "head")),
    "torch's encoder": (Encoder, 8, ("layers_layers_0", "layers_layers_1", "head")),
    "a variational code": (Variational, 1, ("inside", "code", "head")),
    "a root that draws": (Noisy, 1, ("model",)),
    "a recurrent network": (Recurrent, 1, ("rnn", "head")),
    "torch's layers": (layers, 3, tuple("01234567")),
}

# What takes seconds: the slow ring has them.
LARGE = ("torch's encoder", "a block of all layers", "blocks")
