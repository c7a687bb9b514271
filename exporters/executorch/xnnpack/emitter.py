"""How an op is written for XNNPACK: what an emitter is, and what emitters read of a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from exporters.executorch.xnnpack.builder import Builder

TRANSPOSE = 1
"""XNN_FLAG_TRANSPOSE_WEIGHTS of a product, XNN_FLAG_TRANSPOSE_B of a batched one."""


def always(node: fx.Node) -> bool:
    return True


@dataclass(frozen=True)
class Emitter:
    """``emit`` writes a node that ``accepts`` says yes to; ``work`` is what it costs, in element-wise passes."""

    emit: Callable[[Builder, fx.Node], None]
    accepts: Callable[[fx.Node], bool] = always
    work: float = 1.0


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
