"""Strided views of tensors that a rule has laid out channels last: as they lay before, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions import strided as plain
from exporters.decompositions.rule import Rules

_aten = torch.ops.aten


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """Entries at flat positions offset + sum_i k_i stride_i of x in row order."""
    return plain.as_strided(x.contiguous(), size, stride, offset)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """x with what :func:`as_strided` reads replaced by ``source``."""
    return plain.as_strided_scatter(x.contiguous(), source, size, stride, offset)


RULES: Rules = {
    _aten.as_strided.default: as_strided,
    _aten.as_strided_scatter.default: as_strided_scatter,
}
