"""Selections between a value and zero, such as dropout and the gradient of ReLU, as products with a mask of 0 and 1.

XNNPACK has neither comparisons nor selections, and ExecuTorch's own kernels for them take longer than a product of
matrices does on tensors of activations. A product is no selection where the value that is not selected is not finite:
only what :mod:`.finite` knows to be finite is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from exporters.capture.nodes import broadcast_shape, fake_value, node_argument
from exporters.executorch.passes.finite import LARGEST, Finiteness, guess_of, kinds_of
from exporters.executorch.passes.origins import inputs_of, spread

_aten = torch.ops.aten
_ZEROS = {
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
}
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


def selections_multiplied(module: fx.GraphModule) -> None:
    """Rewrite ``module`` in place: where(x >= c, y, 0) becomes y * mask."""
    _Rewriter(module).run()


class _Rewriter:
    def __init__(self, module: fx.GraphModule) -> None:
        self._graph, self._module = module.graph, module
        self._kinds = kinds_of(module)
        self._inputs = inputs_of(module.graph)
        self._guesses = spread(module.graph.nodes, self._guess, _is_whole)
        self._masks: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._made: dict[tuple[fx.Node, fx.Node, bool], fx.Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is _aten.where.self and _is_float(node) and self._is_step(node.args[0]):
                self._rewrite(node, *(node_argument(node, place) for place in range(3)))
        self._graph.eliminate_dead_code()

    def _rewrite(self, node: fx.Node, condition: fx.Node, chosen: fx.Node, other: fx.Node) -> None:
        if self._is_zero(other):
            branch, negated = chosen, False
        elif self._is_zero(chosen):
            branch, negated = other, True
        else:
            return
        if not self._is_finite(branch) or self._may_guard(condition, branch):
            return
        if broadcast_shape(fake_value(condition), fake_value(branch)) != fake_value(node).shape:
            return  # the zeros are what makes it larger
        with self._graph.inserting_before(node):
            new = self._product(branch, condition, negated)
        self._made[condition, branch, negated] = new
        self._kinds[new], self._guesses[new] = self._kinds[node], self._guesses[node]
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _product(self, kept: fx.Node, condition: fx.Node, negated: bool) -> fx.Node:
        """What is left of ``kept``; where its other part is there already, what that did not take."""
        rest = self._made.get((condition, kept, not negated))
        if rest is not None and rest.meta["val"].shape == kept.meta["val"].shape:
            return self._call(_aten.sub.Tensor, kept, rest)
        key = condition, negated
        if key not in self._masks:
            self._masks[key] = self._mask(condition, negated)
        return self._call(_aten.mul.Tensor, kept, self._masks[key])

    def _mask(self, condition: fx.Node, negated: bool) -> fx.Node:
        """1.0 where the condition holds (or fails), else 0.0: the ceiling of a distance that is clamped to [0, 1]."""
        sign, inverted = _COMPARISONS[cast(OpOverload, condition.target)]
        first, second = condition.args[:2] if sign > 0 else condition.args[1::-1]
        if second == 0:
            distance = first
        elif isinstance(first, fx.Node):
            distance = self._call(_aten.sub.Tensor, first, second)
        else:
            distance = self._call(_aten.neg.default, self._call(_aten.sub.Tensor, second, first))
        mask = self._call(_aten.ceil.default, self._call(_aten.clamp.default, distance, 0.0, 1.0))
        if inverted == negated:
            return mask
        return self._call(_aten.add.Tensor, self._call(_aten.neg.default, mask), 1.0)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A node with its fake result."""
        node = self._graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda read: read.meta["val"]))
        return node

    def _is_step(self, condition: Any) -> bool:
        """A comparison of floats whose difference tells which is larger.

        One of a single number is no matter of time, and mostly guards a quotient by it.
        """
        if not isinstance(condition, fx.Node) or condition.target not in _COMPARISONS:
            return False
        if condition.meta["val"].numel() == 1:
            return False
        return all(
            self._is_finite(value) if isinstance(value, fx.Node) else _is_ordinary(value)
            for value in condition.args
        )

    def _guess(self, node: fx.Node) -> int:
        divisor = guess_of(node, self._kinds) if node.op == "call_function" else None
        return 0 if divisor is None else self._inputs[divisor]

    def _may_guard(self, condition: fx.Node, kept: fx.Node) -> bool:
        """Whether the condition reads what a guess about ``kept`` is of, as a mask that its own sum divides."""
        return bool(self._inputs[condition] & self._guesses[kept])

    def _is_zero(self, value: fx.Node) -> bool:
        if value.op == "get_attr":
            return not getattr(self._module, str(value.target)).any()
        return value.target in _ZEROS and bool(value.args[_ZEROS[value.target]] == 0)

    def _is_finite(self, value: fx.Node) -> bool:
        return self._kinds[value] >= Finiteness.FINITE and _is_float(value)


def _is_whole(node: fx.Node) -> bool:
    """Whether the value is no infinity and no NaN whatever it is computed from."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _is_ordinary(bound: Any) -> bool:
    """A number that others are compared with so as to part them, not to find those that are not finite."""
    return isinstance(bound, (int, float)) and abs(bound) < LARGEST


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.float32
