"""Gradients of clamps that ask the clamp's result, which often waits for the backward pass anyway, in place of its input.

ReLU6 before a convolution: the weight's gradient reads the result. torch keeps the input too, a third of what MobileNet's
blocks keep.
"""

from __future__ import annotations

import torch
from torch import fx

from exporters.capture.nodes import fake_value

_aten = torch.ops.aten
_BOUND_OF = {_aten.le.Scalar: 0, _aten.ge.Scalar: 1}
"""Which bound of the clamp a comparison has to name: x <= low where low is what the clamp gives, and x >= high."""


def compare_results(graph: fx.Graph) -> None:
    """x <= low and x >= high become y <= low and y >= high for y = hardtanh(x, low, high): the same for every float x."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        place = _BOUND_OF.get(node.target)
        clamped = _clamp(node.args[0], place, node.args[1]) if place is not None else None
        if clamped is not None and clamped in seen:
            node.replace_input_with(node.args[0], clamped)
        seen.add(node)


def _clamp(value: object, place: int, bound: object) -> fx.Node | None:
    """The clamp of ``value`` that has ``bound``, if there is one."""
    if not isinstance(value, fx.Node):
        return None
    for user in value.users:
        if user.target is _aten.hardtanh.default and fake_value(user).is_floating_point():
            bounds = _bounds(user)
            if bounds is not None and bounds[0] < bounds[1] and bound == bounds[place]:
                return user
    return None


def _bounds(clamp: fx.Node) -> tuple[float, float] | None:
    match clamp.args[1:]:
        case ():
            return -1.0, 1.0
        case (int() | float() as low, int() | float() as high):
            return low, high
    return None
