"""Sorted order for ExecuTorch, which has the best entries of an axis and leaves equal ones in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the entries along ``dim`` in order, and their positions: those of equal entries ascend, as in torch.

    A second sort, of whole numbers without equals, orders the positions within each run of equal entries.
    """
    if not x.dim() or not x.shape[dim]:
        return DECLINED
    size = x.shape[dim]
    values, places = torch.topk(x, size, dim, descending, True)
    if size == 1:
        return values, places
    starts = values.narrow(dim, 1, size - 1) != values.narrow(dim, 0, size - 1)
    first = torch.zeros_like(places.narrow(dim, 0, 1))
    runs = torch.cat((first, starts.to(torch.int64).cumsum(dim)), dim) * size
    ordered = torch.topk(runs + places, size, dim, False, True)[0]
    return values, ordered - runs


RULES: Rules = {_aten.sort.default: sort}
