"""Users for the diagnostics of per_fedavg.md 6.6, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, ShardBatch
from edgefl.objective.objective import Objective
from tests.invariants.fafed.quadratic import NAME, normal, quadratic, random_weights, sample

D = 3


def quadratic_users(matrices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Shard]:
    """Users with eight samples of one quadratic each: no noise."""
    return [
        Shard(sample(a, b).expand(8, -1, -1), torch.zeros(8, dtype=torch.int64))
        for a, b in zip(matrices, offsets, strict=True)
    ]


def quadratic_losses(w: Tensor) -> FlatLoss:
    return FlatLoss(quadratic(len(w)), {NAME: w})


def losses_at(objective: Objective, seed: int) -> FlatLoss:
    return FlatLoss(objective, random_weights(objective, seed))


def sharing_inputs(shares: Sequence[Sequence[int]], inside: int, each: int, seed: int) -> list[Shard]:
    """Users with exactly the same inputs of each class, each class as many times as ``shares`` (users, classes) says."""
    pools = [normal((each, inside), 100 * seed + c) + c for c in range(len(shares[0]))]
    return [
        Shard(
            torch.cat([pool.repeat(times, 1) for pool, times in zip(pools, row, strict=True)]),
            torch.cat([torch.full((each * times,), c) for c, times in enumerate(row)]),
        )
        for row in shares
    ]


def largest_norms(losses: FlatLoss, shards: Sequence[Shard]) -> tuple[float, float]:
    """B and L of single samples: the largest norm of a gradient, and of a (dense) Hessian."""
    gradients, hessians = [], []
    eye = torch.eye(len(losses.start), dtype=torch.float64)
    for shard in shards:
        for row in range(len(shard.x)):
            one = ShardBatch(0, *shard.rows(slice(row, row + 1)))
            gradients.append(float(losses.gradient(losses.start, one).norm()))
            dense = torch.stack([losses.product(losses.start, column, one) for column in eye])
            hessians.append(float(torch.linalg.matrix_norm(dense, 2)))
    return max(gradients), max(hessians)
