"""Statistics for batch norm, taken once after training and frozen in (HeteroFL; fiarse.md 2.9, A11).

Every submodel size has its own: what a layer reads depends on how much of the model stands before it. Static batch norm
has no others. Moving statistics are those of the sizes that were trained, so a cut needs new ones too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeVar

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl.models.layers.explicit import BatchNorm, BnMode
from edgefl.models.layers.given import called
from edgefl.wire.errors import DataError

_Sum = TypeVar("_Sum", int, Tensor)


@dataclass(frozen=True)
class Statistics:
    """Per batch norm, by path: sums over ``passes`` batches of the batch's mean and unbiased variance (float64).

    Clients' sums add up to those of all their batches, so a federation needs no data to leave a device::

        frozen(module, sum(collect(module, batches) for batches in clients))
    """

    passes: Mapping[str, int]
    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            _summed(self.passes, other.passes), _summed(self.mean, other.mean), _summed(self.var, other.var)
        )

    def __radd__(self, zero: int) -> Statistics:
        """So that ``sum`` can begin with 0."""
        return self


def norms(module: nn.Module, *, moving: bool = False) -> dict[str, BatchNorm]:
    """The static batch norms of a model, by path; with ``moving`` those with moving statistics too.

    Not among them: ``frozen`` ones, which were trained with the very statistics that they have.
    """
    return {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, BatchNorm) and (part.mode == "static" or (moving and not part.frozen))
    }


def by_batch(module: nn.Sequential) -> nn.Sequential:
    """A copy of ``module`` whose batch norms, moving ones too, normalise with the statistics of the batch they read."""
    made = copy.deepcopy(module)
    for path, norm in norms(made, moving=True).items():
        made.set_submodule(path, _like(norm, "static"))
    return made


@torch.no_grad()
def collect(module: nn.Sequential, batches: Iterable[Tensors], *, moving: bool = False) -> Statistics:
    """One pass of ``module``, with its own values, over training ``batches`` of its inputs by name, the first as ``x``;
    dropout is off, nothing is changed.

    Of the static batch norms; with ``moving`` of those with moving statistics too, which then have no say. Each layer
    normalises with the statistics of its batch, as in training, and all batches weigh the same: the cumulative average
    of torch's batch norm with ``momentum=None``. So make them of about equal size. DataError if there is no batch.
    """
    bare = (by_batch(module) if moving else copy.deepcopy(module)).eval()
    seen: list[Statistics] = []
    for path, norm in norms(bare).items():
        norm.register_forward_pre_hook(_noting(path, seen))
    total, empty = Statistics({}, {}, {}), True
    for batch in batches:
        called(bare, batch)
        total, empty = reduce(add, seen, total), False
        seen.clear()
    if empty:
        raise DataError(
            "the statistics of batch norm need at least one batch of training data, found none: "
            "add train_x and train_y to the data"
        )
    return total


def frozen(module: nn.Sequential, statistics: Statistics) -> nn.Sequential:
    """A copy of ``module`` that normalises with the averages of ``statistics``, whatever batch it reads.

    Moving statistics that are not in them stay. DataError if a static batch norm is missing in them.
    """
    made = copy.deepcopy(module)
    for path, norm in norms(made, moving=True).items():
        if path in statistics.passes:
            fixed, count = _like(norm, "global"), statistics.passes[path]
            fixed.running_mean = (statistics.mean[path] / count).to(torch.float32)
            fixed.running_var = (statistics.var[path] / count).to(torch.float32)
            made.set_submodule(path, fixed)
        elif norm.mode == "static":
            raise DataError(
                f"there are no statistics for batch norm {path!r}; collect them with this very model"
            )
    return made


def _like(norm: BatchNorm, mode: BnMode) -> BatchNorm:
    """The same layer in ``mode``, without its statistics."""
    made = BatchNorm(norm.channels, mode=mode, keep=norm.keep, eps=norm.eps, affine=norm.weight is not None)
    made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)


def _noting(path: str, seen: list[Statistics]):  # type: ignore[no-untyped-def]
    def hook(_norm: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].to(torch.float64)
        dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1]
        var = x.var(dims, correction=0) * (count / max(count - 1, 1))
        seen.append(Statistics({path: 1}, {path: x.mean(dims)}, {path: var}))

    return hook


def _summed(mine: Mapping[str, _Sum], yours: Mapping[str, _Sum]) -> dict[str, _Sum]:
    return {**mine, **{path: mine[path] + value if path in mine else value for path, value in yours.items()}}
