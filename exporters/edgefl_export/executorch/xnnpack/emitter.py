"""Emitters of ops for XNNPACK, and the arguments of nodes that they read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from edgefl_export.executorch.xnnpack.builder import Builder

TRANSPOSE = 1
"""XNN_FLAG_TRANSPOSE_WEIGHTS of a product, XNN_FLAG_TRANSPOSE_B of a batched one."""


def always(node: fx.Node) -> bool:
    return True


@dataclass(frozen=True)
class Emitter:
    """``emit`` writes a node that ``accepts`` says yes to, whose operands and result are of ``types``; ``work`` is what it
    costs, in element-wise passes."""

    emit: Callable[[Builder, fx.Node], None]
    accepts: Callable[[fx.Node], bool] = always
    work: float = 1.0
    types: Collection[torch.dtype] = (torch.float32,)


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
