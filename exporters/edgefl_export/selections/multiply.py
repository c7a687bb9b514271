"""Selections between a value and zero, such as dropout and the gradient of ReLU, as products with a mask of 0 and 1.

Engines take longer to select than to multiply: onnxruntime five times as long, and on tensors of activations ExecuTorch's
own kernel longer than a product of matrices. A product is no selection where the value that is not selected is not
finite: only what :mod:`.finite` knows to be finite is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import fx

from edgefl_export.capture.nodes import broadcast_shape, fake_value, node_argument
from edgefl_export.named import named
from edgefl_export.selections.finite import LARGEST, VARIANCE, Finiteness, guess_of, kinds_of

# What a value is computed from, as bits that spread from node to node.


def inputs_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node: a bit for each placeholder that it is computed from."""
    bits = {node: 1 << at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    return spread(graph.nodes, lambda node: bits.get(node, 0))


def spread(
    nodes: Iterable[fx.Node],
    own: Callable[[fx.Node], int],
    ends: Callable[[fx.Node], bool] = lambda node: False,
) -> dict[fx.Node, int]:
    """By node, in the order of a graph: its own bits and those of all that it is computed from; 0 where they end."""
    origins: dict[fx.Node, int] = {}
    for node in nodes:
        bits = reduce(or_, (origins[read] for read in node.all_input_nodes), own(node))
        origins[node] = 0 if ends(node) else bits
    return origins


_aten = torch.ops.aten
_ZEROS = {
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
}
_JOINED = named("bitwise_and.Tensor bitwise_or.Tensor logical_and logical_not logical_or")
OPPOSITES = {
    getattr(_aten, one): getattr(_aten, other)
    for one, other in (("gt", "le"), ("le", "gt"), ("lt", "ge"), ("ge", "lt"))
}
"""Comparisons whose masks are made, and what holds where each does not: of numbers, no NaN among them."""

Call = Callable[..., fx.Node]
"""Writes a node for an op and its arguments, with its result."""

Mask = Callable[[fx.Node, bool, Call], fx.Node | None]
"""How an engine says where a condition holds: comparisons, one or several of them, whether it is where they fail, and
what writes nodes; the node of 1.0 there, else 0.0, or None if it cannot."""


def selections_multiplied(module: fx.GraphModule, inputs: Sequence[str], mask: Mask) -> None:
    """Rewrite ``module`` in place: where(x >= c, y, 0) becomes y * mask. ``inputs``: names of its ports, in order."""
    for name, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True):
        node.meta[VARIANCE] = name.endswith(".running_var")
    _Rewriter(module, mask).run()


class _Rewriter:
    def __init__(self, module: fx.GraphModule, mask: Mask) -> None:
        self._graph, self._module, self._mask = module.graph, module, mask
        self._kinds = kinds_of(module)
        self._inputs = inputs_of(module.graph)
        self._guesses = spread(module.graph.nodes, self._guess, _is_whole)
        self._masks: dict[tuple[fx.Node, bool], fx.Node | None] = {}
        self._made: dict[tuple[fx.Node, fx.Node, bool], fx.Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is _aten.where.self and _is_float(node) and self._is_mask(node.args[0]):
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
        if new is None:
            return
        self._made[condition, branch, negated] = new
        self._kinds[new], self._guesses[new] = self._kinds[node], self._guesses[node]
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _product(self, kept: fx.Node, condition: fx.Node, negated: bool) -> fx.Node | None:
        """What is left of ``kept``; where its other part is there already, what that did not take. None without a mask."""
        rest = self._made.get((condition, kept, not negated))
        if rest is not None and rest.meta["val"].shape == kept.meta["val"].shape:
            return self._call(_aten.sub.Tensor, kept, rest)
        key = condition, negated
        if key not in self._masks:
            self._masks[key] = self._mask(condition, negated, self._call)
        mask = self._masks[key]
        return None if mask is None else self._call(_aten.mul.Tensor, kept, mask)

    def _call(self, target: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        """A node with its result, without values."""
        node = self._graph.call_function(target, args, options)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda read: read.meta["val"]), **options)
        return node

    def _is_mask(self, condition: Any) -> bool:
        """Comparisons of what is known to be finite. One of a single number is no matter of time, and mostly guards a
        quotient by it."""
        if not isinstance(condition, fx.Node) or condition.meta["val"].numel() == 1:
            return False
        if condition.target in _JOINED:
            return all(map(self._is_mask, condition.args))
        compares = getattr(condition.target, "overloadpacket", None) in OPPOSITES
        return compares and all(map(self._is_known, condition.args))

    def _is_known(self, value: object) -> bool:
        """Whether a comparison with the value parts others, and does not find those that are not finite."""
        if isinstance(value, fx.Node):
            return self._is_finite(value)
        return isinstance(value, (int, float)) and abs(value) < LARGEST

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


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.float32
