"""Small models: CNNs (embracingfl.md 3.2, fedbat.md 4.1), a bidirectional LSTM (embracingfl.md 3.3), and perceptrons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.layers.norms import GROUPS, BnMode, MakeNorm, NormKind, make_norm
from edgefl.models.layers.recurrent import BiLstm
from edgefl.models.spec import ModelSpec, sequential

Activation = Literal["relu", "tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh}


class ConvPool(nn.Module):
    """5x5 convolution with bias and same padding, ReLU, 2x2 max pool."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 2)


class Dense(nn.Module):
    """Flatten, dense layer with bias, and ``activation`` unless it is None: (B, ...) -> (B, width)."""

    def __init__(self, inside: int, width: int, activation: Activation | None) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x.flatten(1))
        return out if self.activation is None else ACTIVATIONS[self.activation](out)


def chain(
    name: str, layer: Callable[[int, int], nn.Module], widths: Iterable[int]
) -> list[tuple[str, nn.Module]]:
    """Return layers from each width to the next one, called ``name`` and their number from 1."""
    return [(f"{name}{number}", layer(*sizes)) for number, sizes in enumerate(pairwise(widths), start=1)]


def cnn(
    *, in_channels: int = 1, size: int = 28, classes: int = 62, initial: Initial = "keras", seed: int = 0
) -> ModelSpec:
    """Return the FEMNIST CNN: two conv-pool and two dense units, 6,603,710 parameters by default (embracingfl.md 3.2).

    Its activations are counted for one sample, as the paper does for this model (embracingfl.md 2.8).
    """
    side = size // 2 // 2

    def units() -> nn.Sequential:
        return sequential(
            [
                ("conv1", ConvPool(in_channels, 32)),
                ("conv2", ConvPool(32, 64)),
                ("dense1", Dense(64 * side * side, 2048, "relu")),
                ("dense2", Dense(2048, classes, None)),
            ]
        )

    sample = TensorSpec((in_channels, size, size))
    return ModelSpec("cnn", initialize(units, seed, initial), sample, classes, accounting_batch=1)


_FEDBAT_WIDTHS = (32, 64, 128, 256)


class ConvNormPool(nn.Module):
    """3x3 convolution of padding 1 without bias, norm, ReLU, 2x2 max pool: (B, I, H, W) -> (B, W', H//2, W//2)."""

    def __init__(self, inside: int, width: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 3, padding=1, bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


def fedbat_cnn(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    widths: Sequence[int] = _FEDBAT_WIDTHS,
    norm: NormKind = "bn",
    bn: BnMode = "global",
    groups: int = GROUPS,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return FedBAT's CNN: units ``conv1`` ... ``conv4`` and ``head``; 390,890 parameters for 1x28x28, 399,146 for 3x32x32.

    ModelError if ``size`` is too small for a pool behind each convolution.
    """
    side = size >> len(widths)
    if side < 1:
        raise ModelError(
            f"fedbat_cnn halves images {len(widths)} times, so they are at least {1 << len(widths)} wide, found {size}: "
            "take larger images, or fewer widths",
            size=size,
        )
    layer = make_norm(norm, mode=bn, groups=groups)

    def units() -> nn.Sequential:
        inner = [in_channels, *widths]
        convolutions = chain("conv", partial(ConvNormPool, norm=layer), inner)
        head = Dense(inner[-1] * side * side, classes, None)
        return sequential([*convolutions, ("head", head)])

    return ModelSpec(
        "fedbat_cnn", initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes
    )


def mlp(
    *,
    in_channels: int = 1,
    size: int = 28,
    classes: int = 10,
    hidden: Sequence[int] = (128, 64),
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return dense layers with ReLU between them: units ``dense1``, ``dense2``, ..., ``head``."""
    widths = [in_channels * size * size, *hidden]

    def units() -> nn.Sequential:
        layers = chain("dense", partial(Dense, activation="relu"), widths)
        return sequential([*layers, ("head", Dense(widths[-1], classes, None))])

    return ModelSpec("mlp", initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes)


def bilstm(
    *,
    length: int = 256,
    vocabulary: int = 10_000,
    features: int = 256,
    hidden: int = 256,
    rate: float = 0.3,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return the IMDB model: embedding, bidirectional LSTM, one logit; 3,611,137 parameters (embracingfl.md 3.3).

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
    return ModelSpec("bilstm", initialize(units, seed, initial), sample, 2, accounting_batch=1)


HIDDEN = (80, 60)


class NormalLinear(nn.Linear):
    """Dense layer with initial values W ~ N(0, 1 / inputs) and zero biases."""

    def fill(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.in_features**-0.5, generator=generator)
        self.bias.zero_()


class EluDense(nn.Module):
    """Flatten, dense layer with bias, and ELU of slope 1 where ``activate``: (B, ...) -> (B, width)."""

    def __init__(self, inside: int, width: int, *, activate: bool) -> None:
        super().__init__()
        self.activate = activate
        self.dense = NormalLinear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x.flatten(1))
        return F.elu(out) if self.activate else out


def elu_mlp(
    *, in_channels: int = 1, size: int = 28, classes: int = 10, hidden: Sequence[int] = HIDDEN, seed: int = 0
) -> ModelSpec:
    """Return Per-FedAvg's MLP: units ``dense1``, ``dense2``, ``head``; 68,270 parameters (1x28x28) or 251,310 (3x32x32)."""
    widths = [in_channels * size * size, *hidden]

    def units() -> nn.Sequential:
        layers = chain("dense", partial(EluDense, activate=True), widths)
        return sequential([*layers, ("head", EluDense(widths[-1], classes, activate=False))])

    return ModelSpec("elu_mlp", initialize(units, seed), TensorSpec((in_channels, size, size)), classes)
