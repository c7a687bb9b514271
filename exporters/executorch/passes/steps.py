"""Masks without comparisons, which XNNPACK does not have: the ceiling of a distance that is clamped to [0, 1]."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from exporters.selections.multiply import Call

_aten = torch.ops.aten
# x compared with c: whether the mask is the step of x - c (or of c - x), and whether it is inverted.
_COMPARISONS = {
    _aten.gt.Scalar: (1, False),
    _aten.le.Scalar: (1, True),
    _aten.lt.Scalar: (-1, False),
    _aten.ge.Scalar: (-1, True),
    _aten.gt.Tensor: (1, False),
    _aten.le.Tensor: (1, True),
    _aten.lt.Tensor: (-1, False),
    _aten.ge.Tensor: (-1, True),
}


def step(condition: fx.Node, negated: bool, call: Call) -> fx.Node | None:
    """:data:`exporters.selections.multiply.Mask`, by the difference of what is compared, of one comparison."""
    if condition.target not in _COMPARISONS:
        return None
    sign, inverted = _COMPARISONS[cast(OpOverload, condition.target)]
    first, second = condition.args[:2] if sign > 0 else condition.args[1::-1]
    if second == 0:
        distance = first
    elif isinstance(first, fx.Node):
        distance = call(_aten.sub.Tensor, first, second)
    else:
        distance = call(_aten.rsub.Scalar, second, first)
    mask = call(_aten.ceil.default, call(_aten.clamp.default, distance, 0.0, 1.0))
    if inverted == negated:
        return mask
    return call(_aten.rsub.Scalar, mask, 1.0)
