"""Masks of 0 and 1 as onnxruntime makes them fastest: comparisons, and one cast of them."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from exporters.selections.multiply import OPPOSITES, Call


def compared(condition: fx.Node, negated: bool, call: Call) -> fx.Node:
    """:data:`exporters.selections.multiply.Mask`."""
    target = cast(OpOverload, condition.target)
    if negated and target.overloadpacket in OPPOSITES:
        opposite = getattr(OPPOSITES[target.overloadpacket], target._overloadname)
        condition = call(opposite, *condition.args)
    elif negated:
        condition = call(torch.ops.aten.logical_not.default, condition)
    return call(torch.ops.aten._to_copy.default, condition, dtype=torch.float32)
