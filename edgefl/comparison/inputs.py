"""Batches on which a model is compared. Random samples contain the extremes of the inputs' ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.ctc import CTC
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.regression import AbsoluteError, Huber, Quantile, SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.wire.tensors import Array

ATTEMPTS = 5
"""Kinds of samples, from wide to narrow: a model may not be defined on all of them."""
_MAGNITUDES: Sequence[Sequence[float]] = ((1.0, 0.3, 3.0, 1.0, 10.0), (1.0,), (0.5,))
_NUMBERS = (-7, -3, -2, -1, 0, 1, 2, 3, 5, 9, 100, -100, 3, 1, 2)
_IGNORED = 0.2
_REGRESSION = (SquaredError, AbsoluteError, Huber, Quantile)


class UserSamples(Protocol):
    """Interface of the user's training data."""

    @property
    def train_y(self) -> Array:
        """Labels, (n, ...)."""

    def train_batch(self, rows: Array) -> Mapping[str, Array]:
        """Return the samples with indices ``rows`` as a batch: all inputs and labels by name, as the model reads them."""


def batches(
    spec: ModelSpec, rows: int, count: int, seed: int, attempt: int, data: UserSamples | None = None
) -> list[Tensors]:
    """Return ``count`` batches of ``rows`` samples, each with ``x``, ``y`` and further inputs by name.

    Args:
        spec: the model, which determines inputs and labels.
        rows: samples in a batch.
        count: number of batches.
        seed: seed of the random numbers.
        attempt: number of the attempt, below ``ATTEMPTS``; later attempts draw other kinds of random samples.
        data: the user's samples, which replace random ones in the first attempts. It may hold no training samples.
    """
    generator = torch.Generator().manual_seed((seed * 1000 + attempt) % 2**63)
    label = spec.label
    if data is not None and len(data.train_y) and attempt < ATTEMPTS - 1:
        return [_of_data(spec, data, rows, label, generator) for _ in range(count)]
    made = []
    for _ in range(count):
        x = _input("x", spec.sample, spec.sample, rows, generator, attempt)
        others = {
            name: _input(name, each, spec.sample, rows, generator, attempt)
            for name, each in spec.others.items()
        }
        made.append({"x": x, **others, "y": _labels(label, spec.loss, rows, generator)})
    return made


def _of_data(
    spec: ModelSpec, data: UserSamples, rows: int, label: TensorSpec, generator: torch.Generator
) -> Tensors:
    order = torch.randperm(len(data.train_y), generator=generator)
    taken = order.repeat(math.ceil(rows / len(order)))[:rows].numpy()
    batch = {name: torch.from_numpy(np.asarray(each)) for name, each in data.train_batch(taken).items()}
    names = ("x", "y", *spec.others)
    return {name: each for name, each in batch.items() if name in names} | {
        "y": batch["y"].reshape(rows, *label.shape)
    }


def _input(
    name: str, spec: TensorSpec, first: TensorSpec, rows: int, generator: torch.Generator, attempt: int
) -> Tensor:
    shape = (rows, *spec.shape)
    if spec.dtype.is_complex:
        made = torch.randn(shape, generator=generator, dtype=spec.dtype)
    elif spec.dtype.is_floating_point:
        made = _floats(shape, generator, attempt)
    elif spec.below is not None:
        made = _pad(_below(shape, spec.below, generator))
    elif "len" in name and not spec.shape:
        made = torch.randint(1, (first.shape or (1,))[0] + 1, shape, generator=generator)
    elif "mask" in name:
        made = _pad(torch.ones(shape))
    elif attempt or spec.dtype is torch.bool:
        made = torch.randint(0, 2, shape, generator=generator)
    else:
        made = torch.tensor(_NUMBERS)[torch.randint(0, len(_NUMBERS), shape, generator=generator)]
    return made.to(spec.dtype)


def _floats(shape: Sequence[int], generator: torch.Generator, attempt: int) -> Tensor:
    if attempt >= len(_MAGNITUDES):  # a logarithm or a root may read them
        return 0.05 + 0.9 * torch.rand(tuple(shape), generator=generator)
    scales = torch.tensor(_MAGNITUDES[attempt])
    rows = scales[torch.arange(shape[0]) % len(scales)].reshape(-1, *[1] * (len(shape) - 1))
    return rows * torch.randn(tuple(shape), generator=generator)


def _below(shape: Sequence[int], below: int, generator: torch.Generator) -> Tensor:
    """Return integers in 0..below-1, small ones more often, with the smallest and the largest among them."""
    skewed = (torch.rand(tuple(shape), generator=generator) ** 1.5 * below).long().clamp_max(below - 1)
    flat = skewed.reshape(-1)
    few = min(below, len(flat))
    places = torch.randperm(len(flat), generator=generator)[:few]
    flat[places] = torch.arange(few) if few == below else torch.linspace(0, below - 1, few).long()
    return skewed


def _pad(tokens: Tensor) -> Tensor:
    """Return ``tokens`` (rows, steps, ...) with zeros at the end of every other row, as for sequences of unequal
    lengths.
    """
    if tokens.dim() < 2 or tokens.shape[1] < 2:
        return tokens
    steps = tokens.shape[1]
    lengths = torch.tensor(
        [steps if row % 2 == 0 else 1 + (row * 7) % (steps - 1) for row in range(len(tokens))]
    )
    kept = torch.arange(steps) < lengths.unsqueeze(1)
    return tokens * kept.reshape(*kept.shape, *[1] * (tokens.dim() - 2)).to(tokens.dtype)


def _labels(spec: TensorSpec, loss: Loss, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *spec.shape)
    if isinstance(loss, CTC):
        return _texts(shape, spec.below or 2, loss.blank, generator)
    if spec.dtype.is_floating_point:
        draw = torch.randn if isinstance(loss, _REGRESSION) else torch.rand
        return draw(shape, generator=generator).to(spec.dtype)
    y = _below(shape, spec.below or 2, generator).to(spec.dtype)
    if spec.ignored is None or y.numel() < 2:
        return y
    few = torch.rand(shape, generator=generator) < _IGNORED
    few.reshape(-1)[0] = False
    return torch.where(few, torch.full_like(y, spec.ignored), y)


def _texts(shape: Sequence[int], below: int, blank: int, generator: torch.Generator) -> Tensor:
    """Return random texts (rows, length) of unequal lengths, without ``blank`` among the symbols and filled up with
    ``blank``.
    """
    symbols = torch.randint(0, below - 1, tuple(shape), generator=generator)
    symbols = symbols + (symbols >= blank)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    return torch.where(torch.arange(shape[1]) < lengths, symbols, torch.full_like(symbols, blank))
