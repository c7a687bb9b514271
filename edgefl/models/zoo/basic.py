"""The FEMNIST CNN (embracingfl.md 3.2), the IMDB bidirectional LSTM (embracingfl.md 3.3), and a multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.initial import initialised
from edgefl.models.layers.recurrent import BiLstm
from edgefl.models.spec import ModelSpec, sequential


class ConvPool(nn.Module):
    """5x5 convolution with bias and same padding, ReLU, 2x2 max pool."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 2)


class Dense(nn.Module):
    """Flatten, dense layer with bias, and ReLU where ``activate``."""

    def __init__(self, inside: int, width: int, *, activate: bool) -> None:
        super().__init__()
        self.activate = activate
        self.dense = nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x.flatten(1))
        return F.relu(out) if self.activate else out


def cnn(*, in_channels: int = 1, size: int = 28, classes: int = 62, seed: int = 0) -> ModelSpec:
    """The FEMNIST CNN: two conv-pool units and two dense units, 6,603,710 parameters at the defaults (embracingfl.md 3.2).

    Its activations are counted for one sample, as the paper does for this model (embracingfl.md 2.8).
    """
    side = size // 2 // 2

    def units() -> nn.Sequential:
        return sequential(
            [
                ("conv1", ConvPool(in_channels, 32)),
                ("conv2", ConvPool(32, 64)),
                ("dense1", Dense(64 * side * side, 2048, activate=True)),
                ("dense2", Dense(2048, classes, activate=False)),
            ]
        )

    sample = TensorSpec((in_channels, size, size))
    return ModelSpec("cnn", initialised(units, seed), sample, classes, accounting_batch=1)


def mlp(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    hidden: Sequence[int] = (128, 64),
    seed: int = 0,
) -> ModelSpec:
    """Dense layers with ReLU between them: units ``dense1``, ``dense2``, ..., ``head``."""
    widths = [in_channels * size * size, *hidden]

    def units() -> nn.Sequential:
        layers: list[tuple[str, nn.Module]] = [
            (f"dense{number}", Dense(inside, outside, activate=True))
            for number, (inside, outside) in enumerate(pairwise(widths), start=1)
        ]
        return sequential([*layers, ("head", Dense(widths[-1], classes, activate=False))])

    return ModelSpec("mlp", initialised(units, seed), TensorSpec((in_channels, size, size)), classes)


def bilstm(
    *,
    length: int = 256,
    vocabulary: int = 10_000,
    features: int = 256,
    hidden: int = 256,
    rate: float = 0.3,
    seed: int = 0,
) -> ModelSpec:
    """The IMDB model: embedding, bidirectional LSTM with dropout, one logit; 3,611,137 parameters (embracingfl.md 3.3).

    A sample is ``length`` word numbers (int64). Activations are counted for one sample (embracingfl.md 2.8).
    """

    def units() -> nn.Sequential:
        return sequential(
            [
                ("embedding", nn.Embedding(vocabulary, features)),
                ("lstm", BiLstm(features, hidden, length, rate=rate)),
                ("head", nn.Linear(2 * hidden, 1)),
            ]
        )

    sample = TensorSpec((length,), torch.int64, vocabulary)
    return ModelSpec("bilstm", initialised(units, seed), sample, 2, accounting_batch=1)
