"""From a function to the graph that ExecuTorch gets: the rules for it, then what is better seen in the whole graph."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from edgefl_export.capture.nodes import copy_of
from edgefl_export.capture.trace import Captured
from edgefl_export.executorch.passes.layout import transpositions_moved
from edgefl_export.selections.multiply import Call, selections_multiplied

# Masks without comparisons, which XNNPACK does not have: the ceiling of a distance that is clamped to [0, 1].

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
    """:data:`edgefl_export.selections.multiply.Mask`, by the difference of what is compared, of one comparison."""
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


def rewritten(captured: Captured) -> Captured:
    """The same graph with fewer transpositions and comparisons; ``captured`` stays as it is.

    Values count as contiguous whatever strides the trace gave them, as they are in ExecuTorch.
    """
    graph, _ = copy_of(captured.module.graph)
    module = fx.GraphModule(captured.module, graph)
    selections_multiplied(module, tuple(captured.inputs), step)
    transpositions_moved(module.graph)
    module.recompile()
    return replace(captured, module=module)
