"""``max_pool(relu(x))`` as ``relu(max_pool(x))``: the same values and gradients, over a quarter of the entries."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from exporters.capture.nodes import fake_value

_aten = torch.ops.aten
_POOL = _aten.max_pool2d_with_indices.default
_POOL_BACK = _aten.max_pool2d_with_indices_backward.default
_RELU_BACK = _aten.threshold_backward.default


def pool_first(module: fx.GraphModule) -> None:
    """Where a maximum is below 0 its position may be another one, and what its gradient is multiplied with is 0."""
    for pool in [node for node in module.graph.nodes if node.target is _POOL]:
        relu = pool.args[0]
        if relu.target is _aten.relu.default and (backward := _backward(relu, pool)) is not None:
            _exchange(module.graph, relu, pool, backward)
    module.graph.eliminate_dead_code()


def _backward(relu: fx.Node, pool: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """Gradients of the pooling, each with that of ``relu`` after it; None where somebody else reads either."""
    others = [node for node in relu.users if node is not pool]
    pools = [node for node in others if node.target is _POOL_BACK and node.args[1] is relu]
    relus = [node for node in others if node.target is _RELU_BACK and node.args[1:] == (relu, 0)]
    pairs = [
        (back, after) for back in pools for after in relus if after.args[0] is back and len(back.users) == 1
    ]
    return pairs if len(others) == 2 * len(pairs) else None


def _exchange(graph: fx.Graph, relu: fx.Node, pool: fx.Node, backward: list[tuple[fx.Node, fx.Node]]) -> None:
    whole = cast(fx.Node, relu.args[0])
    pool.update_arg(0, whole)
    maxima = [node for node in pool.users if node.target is operator.getitem and node.args[1] == 0]
    if not maxima:
        return
    first = maxima[0]
    with graph.inserting_after(first):
        pooled = graph.call_function(_aten.relu.default, (first,))
    pooled.meta["val"] = fake_value(first)
    for node in maxima:
        node.replace_all_uses_with(pooled, delete_user_cb=lambda reader: reader is not pooled)
    for back, after in backward:
        gradient: Any = back.args[0]
        with graph.inserting_before(back):
            masked = graph.call_function(_RELU_BACK, (gradient, pooled, 0))
        masked.meta["val"] = fake_value(gradient)
        back.update_arg(0, masked)
        back.update_arg(1, whole)
        after.replace_all_uses_with(back)
