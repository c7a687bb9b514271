"""Pass that turns selections between a value and zero, as of dropout and of ReLU's gradient, into products with a mask.

Engines take longer to select than to multiply: onnxruntime five times as long, and on tensors of activations ExecuTorch's
own kernel longer than a product of matrices. A product is no selection if the value that is not selected is infinite or NaN,
because 0 * inf is NaN. So only values that :mod:`edgefl_export.value_ranges` knows to be finite are rewritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import fx

from edgefl_export.capture.nodes import broadcast_shape, fake_value, node_argument
from edgefl_export.named import named
from edgefl_export.value_ranges import LARGEST, ValueRange, guessed_divisor, value_ranges

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
"""Comparisons that have a mask, each with its complement. That holds for numbers only: both are false for NaN."""


class SelectToMultiply(ABC):
    """The pass: where(x >= c, y, 0) -> y * mask, with the mask as an engine computes it fastest."""

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        _Rewriter(module, self).run()

    @abstractmethod
    def mask(self, condition: fx.Node, negated: bool, writer: NodeWriter) -> fx.Node | None:
        """Return the node that is 1.0 where ``condition`` holds (fails, if ``negated``) and 0.0 elsewhere.

        Args:
            condition: one comparison, or several that are joined.
            negated: return the mask of the places where the condition fails.
            writer: inserts new nodes before the selection.

        Returns:
            The mask as float32, or None if the engine has no form for it.
        """


class NodeWriter:
    """Writer of nodes with their fake result, at the place where the graph inserts."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def __call__(self, target: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        """Append a call of ``target`` and return its node."""
        node = self._graph.call_function(target, args, options)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda read: read.meta["val"]), **options)
        return node


class _Rewriter:
    """One run of the pass over a graph."""

    def __init__(self, module: fx.GraphModule, selections: SelectToMultiply) -> None:
        self._graph, self._module, self._selections = module.graph, module, selections
        self._write = NodeWriter(module.graph)
        self._ranges = value_ranges(module)
        self._inputs = _inputs_of(module.graph)
        self._guesses = _spread(module.graph.nodes, self._guess, _is_whole)
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
        self._ranges[new], self._guesses[new] = self._ranges[node], self._guesses[node]
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _product(self, kept: fx.Node, condition: fx.Node, negated: bool) -> fx.Node | None:
        """Return ``kept`` where the condition holds, else 0; None without a mask.

        Both parts of one value, as dropout may leave, take one product: the second part is the value less the first.
        """
        rest = self._made.get((condition, kept, not negated))
        if rest is not None and rest.meta["val"].shape == kept.meta["val"].shape:
            return self._write(_aten.sub.Tensor, kept, rest)
        key = condition, negated
        if key not in self._masks:
            self._masks[key] = self._selections.mask(condition, negated, self._write)
        mask = self._masks[key]
        return None if mask is None else self._write(_aten.mul.Tensor, kept, mask)

    def _is_mask(self, condition: Any) -> bool:
        """Return True for comparisons of finite values, alone or joined.

        A comparison of a single number costs no time, and mostly guards a quotient by that number.
        """
        if not isinstance(condition, fx.Node) or condition.meta["val"].numel() == 1:
            return False
        if condition.target in _JOINED:
            return all(map(self._is_mask, condition.args))
        compares = getattr(condition.target, "overloadpacket", None) in OPPOSITES
        return compares and all(map(self._is_known, condition.args))

    def _is_known(self, value: object) -> bool:
        """Return True if a comparison with the value only divides finite values, and does not test for infinite ones."""
        if isinstance(value, fx.Node):
            return self._is_finite(value)
        return isinstance(value, (int, float)) and abs(value) < LARGEST

    def _guess(self, node: fx.Node) -> int:
        divisor = guessed_divisor(node, self._ranges) if node.op == "call_function" else None
        return 0 if divisor is None else self._inputs[divisor]

    def _may_guard(self, condition: fx.Node, kept: fx.Node) -> bool:
        """Return True if the condition reads an input of a guessed divisor of ``kept``, as a mask and its own sum do."""
        return bool(self._inputs[condition] & self._guesses[kept])

    def _is_zero(self, value: fx.Node) -> bool:
        if value.op == "get_attr":
            return not getattr(self._module, str(value.target)).any()
        return value.target in _ZEROS and bool(value.args[_ZEROS[value.target]] == 0)

    def _is_finite(self, value: fx.Node) -> bool:
        return self._ranges[value] >= ValueRange.FINITE and _is_float(value)


def _is_whole(node: fx.Node) -> bool:
    """Return True if the value can be neither an infinity nor NaN, because it is an integer or a boolean."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.float32


def _inputs_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return by node a bit for each placeholder that it is computed from."""
    bits = {node: 1 << at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    return _spread(graph.nodes, lambda node: bits.get(node, 0))


def _spread(
    nodes: Iterable[fx.Node],
    own: Callable[[fx.Node], int],
    ends: Callable[[fx.Node], bool] = lambda node: False,
) -> dict[fx.Node, int]:
    """Return by node its own bits and those of all nodes that it is computed from; 0 where ``ends`` is true."""
    origins: dict[fx.Node, int] = {}
    for node in nodes:
        bits = reduce(or_, (origins[read] for read in node.all_input_nodes), own(node))
        origins[node] = 0 if ends(node) else bits
    return origins
