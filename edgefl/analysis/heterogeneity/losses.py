"""The users' losses f_i(w) as functions of one flat vector: their gradients and Hessian-vector products on any samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.data.dataset import Array, Dataset
from edgefl.errors import DataError, ModelError
from edgefl.objective.derivatives import difference, gradient, product
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.manifest import SAMPLE

BATCH, FEWEST = 128, 8
"""Samples of a derivative at most, and batches of a user at least where it has as many samples."""

REACH = 1e-2
"""Length of the step of a central difference (per_fedavg.md 2.8)."""


class Shard(NamedTuple):
    """A user's samples x (m, *sample), labels y (m, *label), and the inputs beside x by name."""

    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor] = {}

    def rows(self, at: slice) -> Shard:
        """Some of the samples."""
        return Shard(self.x[at], self.y[at], {name: each[at] for name, each in self.others.items()})


@dataclass(frozen=True, eq=False)
class Shards(Sequence[Shard]):
    """The users' shards of a dataset, made of floats when they are asked for. ``rows`` are shuffled by the caller."""

    dataset: Dataset
    rows: Sequence[Array]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, user):  # type: ignore[no-untyped-def]
        parts = {
            name: torch.from_numpy(each) for name, each in self.dataset.train_batch(self.rows[user]).items()
        }
        return Shard(parts.pop("x"), parts.pop("y"), parts)


def shuffled(rows: Sequence[Array], *, most: int = 0, seed: int = 0) -> list[Array]:
    """Each user's rows in random order, ``most`` of them at most (0: all)."""
    rng = np.random.default_rng(seed)
    orders = [own[rng.permutation(len(own))] for own in rows]
    return [order[: most or len(order)] for order in orders]


@dataclass(frozen=True, eq=False)
class Batch:
    """A part of a shard, and its number there, which decides the noise of dropout layers."""

    number: int
    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.x)


def batches(shard: Shard, user: int) -> list[Batch]:
    """``shard`` in at least two parts of nearly equal size. DataError for a user with a single sample."""
    samples = len(shard.x)
    if samples < 2:
        raise DataError(
            f"user {user} has {samples} samples, and differences between users cannot be told from noise with fewer than "
            "two: use more samples, or fewer devices",
            user=user,
        )
    count = max(-(-samples // BATCH), min(FEWEST, samples // 2), 2)
    parts = torch.arange(samples).tensor_split(count)
    return [
        Batch(number, *shard.rows(slice(int(rows[0]), int(rows[-1]) + 1)))
        for number, rows in enumerate(parts)
    ]


@dataclass(frozen=True, eq=False)
class Losses:
    """An objective's training loss at flat vectors of its trainable tensors; the fixed ones stay as in ``weights``."""

    objective: Objective
    weights: Tensors
    _specs: dict[int, Sequence[tuple[str, TensorSpec]]] = field(default_factory=dict, init=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return self.objective.trainable

    @cached_property
    def start(self) -> Tensor:
        """The trainable tensors of ``weights``, flat."""
        return self._flat(self.weights)

    def gradient(self, at: Tensor, batch: Batch) -> Tensor:
        """Of the batch's mean loss, flat."""
        return self._flat(gradient(self.objective, self._all(at), self._given(batch))[2])

    def product(self, at: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        """The Hessian of the batch's mean loss, times ``vector``: exact, or for layers without second derivatives
        (recurrent ones) the central difference of gradients, right to about three digits in float32."""
        there, inputs, direction = self._all(at), self._given(batch), self._named(vector)
        try:
            return self._flat(product(self.objective, there, inputs, direction))
        except ModelError:
            h = REACH / vector.norm().clamp_min(1e-12)
            return self._flat(difference(self.objective, there, inputs, direction, h))

    def mean(self, of: Callable[[Batch], Tensor], parts: Sequence[Batch]) -> Tensor:
        """The mean over all samples of ``parts`` of what ``of`` gives as a batch's mean."""
        total = sum(part.size for part in parts)
        result = torch.zeros_like(self.start)
        for part in parts:
            result += of(part) * (part.size / total)
        return result

    def _given(self, batch: Batch) -> Tensors:
        parts = {"x": batch.x, SAMPLE: batch.x, "y": batch.y, **batch.others}
        return {**prefixed("batch.0", parts), **dict(self._noise(batch))}

    def _noise(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Dropout drops the same entries of a batch at every point, so that points can be compared."""
        generator = torch.Generator().manual_seed(batch.number)
        for name, spec in self._drawn(batch.size):
            yield f"noise.{name}", torch.rand(spec.shape, generator=generator, dtype=spec.dtype)

    def _drawn(self, size: int) -> Sequence[tuple[str, TensorSpec]]:
        if size not in self._specs:
            self._specs[size] = tuple(self.objective.noise(size).items())
        return self._specs[size]

    def _all(self, at: Tensor) -> Tensors:
        return {**self.weights, **self._named(at)}

    def _flat(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def _named(self, flat: Tensor) -> Tensors:
        sizes = [self.weights[name].numel() for name in self.names]
        parts = zip(self.names, torch.split(flat, sizes), strict=True)
        return {name: part.reshape(self.weights[name].shape) for name, part in parts}
