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
from edgefl.objective.derivatives import difference_hvp, gradient, hvp
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.manifest import SAMPLE

BATCH, FEWEST = 128, 8
"""Samples of a derivative at most, and batches of a user at least where it has as many samples."""

REACH = 1e-2
"""Length of the step of a central difference (per_fedavg.md 2.8)."""


class Shard(NamedTuple):
    """A user's samples x (m, *sample), labels y (m, *label), and further inputs by name (``others``)."""

    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor] = {}

    def rows(self, at: slice) -> Shard:
        """Return the shard of the samples in the slice ``at``."""
        return Shard(self.x[at], self.y[at], {name: each[at] for name, each in self.others.items()})


@dataclass(frozen=True, eq=False)
class DatasetShards(Sequence[Shard]):
    """Shards of the users of a dataset, converted to float tensors when they are read.

    Attributes:
        dataset: the dataset.
        rows: rows of each user, in random order.
    """

    dataset: Dataset
    rows: Sequence[Array]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, user):  # type: ignore[no-untyped-def]
        parts = {
            name: torch.from_numpy(each) for name, each in self.dataset.train_batch(self.rows[user]).items()
        }
        return Shard(parts.pop("x"), parts.pop("y"), parts)


def shuffle_rows(rows: Sequence[Array], *, most: int = 0, seed: int = 0) -> list[Array]:
    """Return each user's rows in random order, cut to ``most``.

    Args:
        rows: each user's rows of the dataset, int64 (m_i,).
        most: largest number of rows per user; 0 for all.
        seed: seed of the order.

    Returns:
        The rows per user.
    """
    rng = np.random.default_rng(seed)
    orders = [own[rng.permutation(len(own))] for own in rows]
    return [order[: most or len(order)] for order in orders]


@dataclass(frozen=True, eq=False)
class ShardBatch:
    """Batch of a shard's samples: x, y, and further inputs by name (``others``). Its ``number`` within the shard seeds
    the noise of dropout layers.
    """

    number: int
    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.x)


def batches(shard: Shard, user: int) -> list[ShardBatch]:
    """Divide a shard into at least two batches of nearly equal size.

    Args:
        shard: the user's samples.
        user: number of the user, for the error.

    Returns:
        The batches, of at most 128 samples.

    Raises:
        DataError: if the user has fewer than two samples.
    """
    samples = len(shard.x)
    if samples < 2:
        raise DataError(
            f"user {user} has {samples} samples, and differences between users need at least "
            "two: use more samples, or fewer devices",
            user=user,
        )
    count = max(-(-samples // BATCH), min(FEWEST, samples // 2), 2)
    parts = torch.arange(samples).tensor_split(count)
    return [
        ShardBatch(number, *shard.rows(slice(int(rows[0]), int(rows[-1]) + 1)))
        for number, rows in enumerate(parts)
    ]


@dataclass(frozen=True, eq=False)
class FlatLoss:
    """Training loss f(w) of an objective as a function of a flat vector w (d,) of its trainable tensors.

    Attributes:
        objective: the objective.
        weights: all tensors by name; those that are not trainable keep these values.
    """

    objective: Objective
    weights: Tensors
    _specs: dict[int, Sequence[tuple[str, TensorSpec]]] = field(default_factory=dict, init=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return self.objective.trainable

    @cached_property
    def start(self) -> Tensor:
        """Vector (d,) of the trainable tensors in ``weights``."""
        return self._flat(self.weights)

    def gradient(self, at: Tensor, batch: ShardBatch) -> Tensor:
        """Return the gradient (d,) of the batch's mean loss at the point ``at`` (d,)."""
        return self._flat(gradient(self.objective, self._all(at), self._batch_tensors(batch))[2])

    def product(self, at: Tensor, vector: Tensor, batch: ShardBatch) -> Tensor:
        """Return the Hessian-vector product (d,) of the batch's mean loss at the point ``at`` (d,) with ``vector`` (d,).

        It is exact. Layers without second derivatives (recurrent ones) get the central difference of gradients, which
        has about three right digits in float32 (per_fedavg.md 2.8).
        """
        there, inputs, direction = self._all(at), self._batch_tensors(batch), self._split_flat(vector)
        try:
            return self._flat(hvp(self.objective, there, inputs, direction))
        except ModelError:
            h = REACH / vector.norm().clamp_min(1e-12)
            return self._flat(difference_hvp(self.objective, there, inputs, direction, h))

    def mean(self, of: Callable[[ShardBatch], Tensor], parts: Sequence[ShardBatch]) -> Tensor:
        """Return the mean of a vector (d,) over all samples of ``parts``. ``of`` returns its mean over one batch."""
        total = sum(part.size for part in parts)
        result = torch.zeros_like(self.start)
        for part in parts:
            result += of(part) * (part.size / total)
        return result

    def _batch_tensors(self, batch: ShardBatch) -> Tensors:
        parts = {"x": batch.x, SAMPLE: batch.x, "y": batch.y, **batch.others}
        return {**prefixed("batch.0", parts), **dict(self._noise(batch))}

    def _noise(self, batch: ShardBatch) -> Iterator[tuple[str, Tensor]]:
        """Yield (input name, noise) of a batch. The noise is equal at every point, so that points can be compared."""
        generator = torch.Generator().manual_seed(batch.number)
        for name, spec in self._drawn(batch.size):
            yield f"noise.{name}", torch.rand(spec.shape, generator=generator, dtype=spec.dtype)

    def _drawn(self, size: int) -> Sequence[tuple[str, TensorSpec]]:
        if size not in self._specs:
            self._specs[size] = tuple(self.objective.noise(size).items())
        return self._specs[size]

    def _all(self, at: Tensor) -> Tensors:
        return {**self.weights, **self._split_flat(at)}

    def _flat(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def _split_flat(self, flat: Tensor) -> Tensors:
        sizes = [self.weights[name].numel() for name in self.names]
        parts = zip(self.names, torch.split(flat, sizes), strict=True)
        return {name: part.reshape(self.weights[name].shape) for name, part in parts}
