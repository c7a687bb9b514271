"""Ops by their names, for tables."""

from __future__ import annotations

import torch
from torch._ops import OpOverload


def named(names: str) -> frozenset[OpOverload]:
    """Return the ops of ``aten`` with these names: ``mm`` for its default overload, ``add.Tensor`` for another one."""
    parts = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(torch.ops.aten, op), overload or "default") for op, _, overload in parts)
