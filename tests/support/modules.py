"""Generator of modules that people could have written: :func:`generated` of a seed, :func:`cases` for hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from tests.support import blocks
from tests.support.case import Case, mean_cross_entropy
from tests.support.treatments import chosen_changes

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A layer to be made and the shape of one sample behind it."""

    make: Make
    shape: Shape


def generated(seed: int) -> Case:
    """Return the module of ``seed``: the same for ever, layers and weights included."""
    return composed(Random(seed), f"seed_{seed}")


def cases() -> st.SearchStrategy[Case]:
    """Return the strategy of all modules; a failing one shrinks to fewer and simpler layers."""
    return st.randoms(use_true_random=False).map(composed)


def composed(random: Random, name: str = "drawn") -> Case:
    """Compose one module, its treatment and its loss by choices of ``random``."""
    domain = random.choice(["vector", "sequence", "tokens", "image"])
    sample = _sample(random, domain)
    parts = _body(random, domain, sample)
    classes = random.choice([2, 3, 5, 7])
    loss = _loss(random, classes)
    makes: list[Make] = [part.make for part in parts]
    makes.append(partial(nn.Linear, parts[-1].shape[0], loss.outputs))
    root = random.choice(["sequential", "sequential", "loop", "named"])
    values = random.randrange(1 << 16)

    def bare() -> nn.Module:
        torch.manual_seed(values)
        return _rooted(root, [make() for make in makes])

    changes = chosen_changes(random, bare())

    def make() -> nn.Module:
        module = bare()
        for change in changes:
            change(module)
        return module

    return Case(name, "generated", "trains", make, sample, classes, loss.argument, loss.function, loss.labels)


def _sample(random: Random, domain: str) -> TensorSpec:
    if domain == "tokens":
        return TensorSpec((random.choice([1, 3, 6, 9]),), torch.int64, below=random.choice([2, 11, 37]))
    if domain == "sequence":
        return TensorSpec((random.choice([2, 5, 8]), random.choice([4, 8, 10])))
    if domain == "image":
        height = random.choice([7, 8, 11])
        return TensorSpec((random.choice([1, 3]), height, random.choice([height, height, 9])))
    return TensorSpec((random.choice([1, 5, 8, 17]),))


def _body(random: Random, domain: str, sample: TensorSpec) -> list[Part]:
    """Return the layers up to a vector for each sample."""
    shape, parts = sample.shape, []

    def add(part: Part) -> None:
        nonlocal shape
        parts.append(part)
        shape = part.shape

    if domain == "tokens":
        width = random.choice([4, 8])
        add(Part(partial(nn.Embedding, sample.below or 2, width), (*shape, width)))
    while len(shape) == 2 and len(parts) < 5 and random.random() < 0.75:
        add(_sequence(random, shape))
    if len(shape) == 2:
        how = random.choice(["mean", "last", "max", "learned"])
        add(Part(partial(blocks.Pooled, shape[1], how), shape[1:]))
    while len(shape) == 3 and len(parts) < 5 and random.random() < 0.75:
        add(_image(random, shape))
    if len(shape) == 3:
        add(_flat(random, shape))
    for _ in range(random.choice([1, 1, 2, 3])):
        add(_vector(random, shape))
    return parts


def _flat(random: Random, shape: Shape) -> Part:
    size = shape[0] * shape[1] * shape[2]
    if size <= 400 and random.random() < 0.5:
        return Part(nn.Flatten, (size,))
    pool = random.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
    return Part(lambda: nn.Sequential(pool(1), nn.Flatten()), (shape[0],))


def _activation(random: Random) -> Make:
    kinds: list[Make] = [
        nn.ReLU,
        nn.GELU,
        nn.Tanh,
        nn.SiLU,
        nn.ELU,
        nn.Softplus,
        nn.Mish,
        nn.Hardswish,
        nn.Sigmoid,
    ]
    kinds += [partial(nn.LeakyReLU, 0.2), nn.PReLU, nn.LogSigmoid, nn.Softsign, nn.CELU]
    return random.choice(kinds)


def _same_width(random: Random, width: int, depth: int = 0) -> Make:
    """Return a layer on the last dimension that keeps its size."""
    rate = random.choice([0.1, 0.5])
    kinds: list[Make] = [
        partial(nn.Linear, width, width),
        partial(nn.Linear, width, width, bias=False),
        partial(nn.LayerNorm, width),
        _activation(random),
        partial(blocks.Moving, width, rate),
        partial(blocks.Counting, random.choice([2, 5])),
        blocks.Logging,
        partial(blocks.Standardised, width),
        partial(blocks.Experts, width),
        partial(blocks.LowRank, width),
        partial(blocks.Called, width),
        partial(blocks.FunctionalDropout, rate),
        partial(nn.Dropout, rate),
        blocks.Branched,
    ]
    if depth < 2:
        inner = _chain(random, width, depth + 1)
        kinds += [
            lambda: blocks.Residual(inner()),
            lambda: blocks.Gated(inner(), width),
            partial(_quiet, inner, random.choice(["no_grad", "inference", "detach"])),
            inner,
        ]
    return random.choice(kinds)


def _quiet(inner: Make, how: str) -> nn.Module:
    return blocks.Quiet(inner(), how)


def _chain(random: Random, width: int, depth: int) -> Make:
    makes = [_same_width(random, width, depth) for _ in range(random.choice([1, 2]))]
    return lambda: nn.Sequential(*(make() for make in makes))


def _vector(random: Random, shape: Shape) -> Part:
    (width,) = shape
    out = random.choice([4, 6, 9])
    wide: Make = partial(nn.Linear, width, out)
    act = _activation(random)
    options = [
        Part(lambda: nn.Sequential(wide(), nn.BatchNorm1d(out), act()), (out,)),
        Part(lambda: nn.Sequential(wide(), act()), (out,)),
        Part(lambda: blocks.Branches(wide(), nn.Sequential(nn.Linear(width, 3), act()), -1), (out + 3,)),
        Part(partial(nn.BatchNorm1d, width), shape),
        Part(_same_width(random, width), shape),
        Part(_same_width(random, width), shape),
    ]
    return random.choice(options)


def _sequence(random: Random, shape: Shape) -> Part:
    length, width = shape
    hidden, rate = random.choice([4, 6]), random.choice([0.0, 0.3])
    kind = random.choice(["LSTM", "GRU", "RNN"])
    both = random.random() < 0.3
    options = [
        Part(
            partial(blocks.Recurrent, kind, width, hidden, bidirectional=both), (length, hidden * (1 + both))
        ),
        Part(partial(blocks.Recurrent, kind, width, hidden, num_layers=2), (length, hidden)),
        Part(partial(_own_gru, width, hidden), (length, hidden)),
        Part(partial(blocks.Stepped, width, hidden), (length, hidden)),
        Part(partial(blocks.Positions, length, width), shape),
        Part(partial(blocks.OverTime, width, hidden, 3), (length, hidden)),
        Part(_same_width(random, width), shape),
        Part(_same_width(random, width), shape),
    ]
    if width % 2 == 0:
        options += [
            Part(partial(blocks.Attention, width, 2, 0.0, random.random() < 0.5), shape),
            Part(partial(blocks.OwnAttention, width, 2, 0.0), shape),
            Part(partial(_encoder, width, rate, random.random() < 0.5), shape),
        ]
    return random.choice(options)


def _own_gru(width: int, hidden: int) -> nn.Module:
    module = blocks.Recurrent("GRU", width, hidden)
    module.rnn = blocks.ScaledGRU(width, hidden, batch_first=True)
    return module


def _encoder(width: int, rate: float, norm_first: bool) -> nn.Module:
    """Return a transformer layer: frozen in inference mode if it would draw."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, rate, batch_first=True, norm_first=norm_first)
    return layer.eval().requires_grad_(False) if rate else layer


def _image(random: Random, shape: Shape) -> Part:
    channels, height, width = shape
    out = random.choice([4, 6])
    kernel, stride = random.choice([1, 2, 3]), random.choice([1, 1, 2])
    pad, dilation = random.choice([0, kernel // 2]), random.choice([1, 1, 2])
    conv = partial(nn.Conv2d, channels, out, kernel, stride=stride, padding=pad, dilation=dilation)
    act = _activation(random)
    behind = _behind(conv, shape)
    options = [
        Part(partial(nn.BatchNorm2d, channels), shape),
        Part(partial(blocks.ActiveNorm, channels), shape),
        Part(partial(nn.GroupNorm, 1, channels), shape),
        Part(partial(nn.InstanceNorm2d, channels, affine=True), shape),
        Part(partial(blocks.SqueezeExcite, channels), shape),
        Part(act, shape),
        Part(partial(nn.Dropout, 0.3), shape),
        Part(partial(blocks.StandardisedConv, channels, channels, 3, padding=1), shape),
        Part(
            lambda: blocks.Residual(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), act())), shape
        ),
    ]
    if min(behind[1:]) > 1:
        options += [
            Part(conv, behind),
            Part(lambda: nn.Sequential(conv(), nn.BatchNorm2d(out), act()), behind),
        ]
    if min(height, width) >= 5:
        kind: Any = random.choice([nn.MaxPool2d, nn.AvgPool2d])
        pool = partial(kind, 2, ceil_mode=random.random() < 0.5)
        options += [Part(pool, _behind(pool, shape))]
    if height * width <= 80:
        options += [Part(partial(nn.ConvTranspose2d, channels, out, 2), (out, height + 1, width + 1))]
    return random.choice(options)


def _behind(make: Make, shape: Shape) -> Shape:
    """Return the shape behind a layer, or zeros where the kernel does not fit."""
    try:
        with torch.no_grad():
            return tuple(make()(torch.zeros(1, *shape)).shape[1:])
    except RuntimeError:
        return (0, 0, 0)


def _rooted(root: str, layers: Sequence[nn.Module]) -> nn.Module:
    if root == "loop":
        return blocks.Looped(layers)
    if root == "named":
        module = nn.Sequential()
        for place, layer in enumerate(layers):
            module.add_module(f"{type(layer).__name__.lower()}_{place}", layer)
        return module
    return nn.Sequential(*layers)


class _Loss(NamedTuple):
    outputs: int
    argument: Any
    function: Callable[[Tensor, Tensor], Tensor]
    labels: TensorSpec | None


def _loss(random: Random, classes: int) -> _Loss:
    kind = random.choice(["default", "default", "weights", "smoothing", "ignored", "sum", "each", "squared"])
    numbers = TensorSpec((), torch.int64, below=classes)
    if kind == "default":
        return _Loss(classes, None, mean_cross_entropy, None)
    if kind == "squared":
        labels = TensorSpec((2,))
        return _Loss(2, edgefl.losses.own_loss(F.smooth_l1_loss, labels=labels), F.smooth_l1_loss, labels)
    if kind == "each":
        each = partial(F.cross_entropy, reduction="none")
        return _Loss(
            classes, edgefl.losses.own_loss(each, labels=numbers), lambda out, y: each(out, y).mean(), numbers
        )
    own: Any = {
        "weights": nn.CrossEntropyLoss(weight=torch.linspace(0.2, 3.0, classes)),
        "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
        "ignored": nn.CrossEntropyLoss(ignore_index=classes - 1),
        "sum": lambda out, y: 0.2 * F.cross_entropy(out, y, reduction="sum"),
    }[kind]
    return _Loss(classes, edgefl.losses.own_loss(own, labels=numbers), own, numbers)
