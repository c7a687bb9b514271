"""ONNX models from captured functions."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from edgefl.contract.algorithm import Function
from edgefl_export.capture.equal import merge_equal
from edgefl_export.capture.storing import stored_at_once
from edgefl_export.capture.trace import Captured, Joint, capture
from edgefl_export.ordering import POSITIVE
from edgefl_export.selections.multiply import OPPOSITES, Call, selections_multiplied

# Masks of 0 and 1 as onnxruntime makes them fastest: one op on how far numbers lie beyond what they are compared with.
#
# Its comparisons and casts run on one thread whatever threads there are, and where another core's cache holds half of what
# they read, they take several times as long.

_aten = torch.ops.aten


def compared(condition: fx.Node, negated: bool, call: Call) -> fx.Node:
    """:data:`edgefl_export.selections.multiply.Mask`. What several selections read, as dropout's both passes do, is
    compared: where values wait in halves it waits in a byte for each (:mod:`edgefl_export.capture.storing`)."""
    distance = _distance(condition, negated, call) if len(condition.users) == 1 else None
    if distance is not None:
        return call(POSITIVE, distance)
    target = cast(OpOverload, condition.target)
    if negated and target.overloadpacket in OPPOSITES:
        opposite = getattr(OPPOSITES[target.overloadpacket], target._overloadname)
        condition = call(opposite, *condition.args)
    elif negated:
        condition = call(_aten.logical_not.default, condition)
    return call(_aten._to_copy.default, condition, dtype=torch.float32)


def _distance(condition: fx.Node, negated: bool, call: Call) -> fx.Node | None:
    """What is positive where the condition holds (fails, if ``negated``), and zero or negative elsewhere; None where it
    holds at its bound too."""
    if negated and condition.target in (_aten.logical_or.default, _aten.bitwise_or.Tensor):
        return _between(condition, call)
    x, bound = condition.args[:2] if len(condition.args) > 1 else (None, None)
    if (
        not isinstance(x, fx.Node)
        or not isinstance(bound, int | float)
        or x.meta["val"].dtype != torch.float32
    ):
        return None
    bound = float(bound)
    if condition.target is (_aten.le.Scalar if negated else _aten.gt.Scalar):
        return x if bound == 0 else call(_aten.sub.Tensor, x, bound)
    if condition.target is (_aten.ge.Scalar if negated else _aten.lt.Scalar):
        return call(_aten.rsub.Scalar, x, bound)
    return None


def _between(outside: fx.Node, call: Call) -> fx.Node | None:
    """Of x <= low or x >= high: (x - low) (high - x), which is negative beyond either."""
    sides = [side for side in outside.args if isinstance(side, fx.Node)]
    targets = {side.target for side in sides}
    if targets != {_aten.le.Scalar, _aten.ge.Scalar} or len({side.args[0] for side in sides}) > 1:
        return None
    below, above = sorted(sides, key=lambda side: side.target is _aten.ge.Scalar)
    if not below.args[1] < above.args[1]:  # type: ignore[operator]
        return None
    first, second = (_distance(side, True, call) for side in (below, above))
    return None if first is None or second is None else call(_aten.mul.Tensor, first, second)


REWRITTEN = ".next"
"""Ends the name of an output that an input has too."""


def capture_for(function: Function, joint: Joint | None = None) -> Captured:
    """Return ``function`` as a graph for onnxruntime: with products for selections, with each value computed once, and
    with values that wait in fewer bits stored at once.

    Raises ExportError as :func:`edgefl_export.capture.trace.capture` does.
    """
    captured = capture(function, joint=joint)
    selections_multiplied(captured.module, tuple(captured.inputs), compared)
    stored_at_once(captured.module.graph)
    merge_equal(captured.module.graph)
    captured.module.recompile()
    return captured
