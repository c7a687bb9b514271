"""Picking by positions: ExecuTorch's kernel does not count from the end."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions import indexing as plain
from exporters.decompositions.rule import Rules

_aten = torch.ops.aten


def index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """x[indices], None standing for a whole axis; negative positions count from the end."""
    return plain.index(x, [_from_the_start(each, x.shape[axis]) for axis, each in enumerate(indices)])


def _from_the_start(places: Tensor | None, size: int) -> Tensor | None:
    if places is None or places.dtype == torch.bool:
        return places
    wide = places.long()
    return torch.where(wide < 0, wide + size, wide)


RULES: Rules = {_aten.index.Tensor: index}
