"""Statistics for batch norm, taken once after training and frozen in (HeteroFL; fiarse.md 2.9, A11).

Every submodel size has its own: what a layer reads depends on how much of the model stands before it. Static batch norm
has no others. Moving statistics are those of the sizes that were trained, so a cut needs new ones too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl.models.copies import copy_module
from edgefl.models.layers.explicit import BatchNorm
from edgefl.models.layers.given import called
from edgefl.models.modes import is_inference
from edgefl.wire.errors import DataError

_Sum = TypeVar("_Sum", int, Tensor)
Norm = BatchNorm | nn.modules.batchnorm._BatchNorm


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


def is_norm(part: nn.Module) -> TypeGuard[Norm]:
    """Return True for a batch norm, torch's or this package's."""
    return isinstance(part, BatchNorm | nn.modules.batchnorm._BatchNorm)


def norms(module: nn.Module, *, moving: bool = False) -> dict[str, Norm]:
    """Return the static batch norms of a model by path; with ``moving`` also those with moving statistics.

    Norms that stay in inference mode keep their moving statistics, so they are left out.
    """
    return {
        path: part
        for path, part in module.named_modules()
        if is_norm(part) and (_is_static(part) or (moving and not is_inference(part)))
    }


def by_batch(module: nn.Sequential) -> nn.Sequential:
    """Return a copy of ``module`` whose batch norms, moving ones too, normalise by the statistics of each batch.

    Norms that stay in inference mode keep their statistics.
    """
    made = copy_module(module)
    for norm in norms(made, moving=True).values():
        _set_statistics(norm, None, None)
    return made


@torch.no_grad()
def collect(module: nn.Sequential, batches: Iterable[Tensors], *, moving: bool = False) -> Statistics:
    """Run ``module`` once over training ``batches`` of its inputs by name, the first as ``x``, and return statistics.

    Covers the norms that :func:`norms` returns for ``moving``. Each norm normalises by its batch, as in training, and all
    batches weigh the same: the cumulative average of torch's batch norm with ``momentum=None``. So make the batches of
    about equal size. Dropout is off and ``module`` stays as it is.
    Raises DataError if there is no batch.
    """
    bare = (by_batch(module) if moving else copy_module(module)).eval()
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
    """Return a copy of ``module`` that normalises by the averages of ``statistics``, whatever batch it reads.

    Moving statistics without an entry stay. Raises DataError if a static batch norm has no entry.
    """
    made = copy_module(module)
    for path, norm in norms(made, moving=True).items():
        if path in statistics.passes:
            mean, var = (
                (sums[path] / statistics.passes[path]).to(torch.float32)
                for sums in (statistics.mean, statistics.var)
            )
            _set_statistics(norm, mean, var)
        elif _is_static(norm):
            raise DataError(
                f"there are no statistics for batch norm {path!r}; collect them with this very model"
            )
    return made


def _is_static(norm: Norm) -> bool:
    return getattr(norm, "running_mean", None) is None


def _set_statistics(norm: Norm, mean: Tensor | None, var: Tensor | None) -> None:
    norm.register_buffer("running_mean", mean)
    norm.register_buffer("running_var", var)
    if isinstance(norm, BatchNorm):
        norm.mode = "static" if mean is None else "global"
    else:
        norm.track_running_stats = mean is not None


def _noting(path: str, seen: list[Statistics]):  # type: ignore[no-untyped-def]
    def hook(_norm: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].to(torch.float64)
        dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1]
        var = x.var(dims, correction=0) * (count / max(count - 1, 1))
        seen.append(Statistics({path: 1}, {path: x.mean(dims)}, {path: var}))

    return hook


def _summed(mine: Mapping[str, _Sum], yours: Mapping[str, _Sum]) -> dict[str, _Sum]:
    return {**mine, **{path: mine[path] + value if path in mine else value for path, value in yours.items()}}
