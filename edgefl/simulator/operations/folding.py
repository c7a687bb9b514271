"""Folding of constants, removal of operations without effect, and pooling before ReLU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from edgefl_export.capture.nodes import fake_value

_aten = torch.ops.aten

# ``max_pool(relu(x))`` as ``relu(max_pool(x))``: the same values and gradients, over a quarter of the entries.

_POOL = _aten.max_pool2d_with_indices.default
_POOL_BACK = _aten.max_pool2d_with_indices_backward.default
_RELU_BACK = _aten.threshold_backward.default


def pool_first(module: fx.GraphModule) -> None:
    """Replace ``max_pool(relu(x))`` by ``relu(max_pool(x))`` in a recorded list of operations, in place.

    ReLU then has fewer entries, a quarter for 2x2 windows.

    Values and gradients are equal. If a maximum is below 0 its position may differ, but its gradient is multiplied by 0.
    """
    for pool in [node for node in module.graph.nodes if node.target is _POOL]:
        relu = pool.args[0]
        if relu.target is _aten.relu.default and (backward := _backward(relu, pool)) is not None:
            _exchange(module.graph, relu, pool, backward)
    module.graph.eliminate_dead_code()


def _backward(relu: fx.Node, pool: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """Return pairs (gradient node of the pooling, gradient node of ``relu`` that reads it). Return None if any other
    node reads ``relu``.
    """
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


_MOST_BYTES = 1 << 16
"""Most bytes of a value that is kept between calls."""
_OF_A_SHAPE = frozenset(
    {_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
    | {_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default}
)
"""Ops that read only shape and type of their first argument."""
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.expand.default})
_SWAPS = frozenset({_aten.t.default, _aten.transpose.int})
_COPIES = frozenset({_aten.alias.default, _aten.detach.default})


def fold(module: fx.GraphModule) -> None:
    """Remove operations without effect from ``module``, a recorded list of operations, and replace those with constant
    results by constants, in place.

    No operation of the list may write to an input.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if (same := _same(node)) is not None:
            node.replace_all_uses_with(same)
        elif (value := _value(module, node)) is not None:
            _keep(module, node, value)
    module.graph.eliminate_dead_code()


def _same(node: fx.Node) -> fx.Node | None:
    """Return an earlier node with the same value as ``node``, or None if there is none."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.target in _COPIES:
        return first
    if node.target in _RESHAPES and fake_value(node).shape == fake_value(first).shape:
        return first
    if (
        node.target is _aten.mul.Scalar
        and node.args[1] == 1
        and fake_value(node).dtype == fake_value(first).dtype
    ):
        return first
    if node.target in _SWAPS and first.target is node.target and {*first.args[1:]} == {*node.args[1:]}:
        inner = first.args[0]
        return inner if isinstance(inner, fx.Node) else None
    return None


def _value(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return the constant value of a node; None if the node depends on inputs, or its value exceeds 64 KiB."""
    found = node.meta.get("val")
    if not isinstance(found, Tensor) or found.nbytes > _MOST_BYTES:
        return None
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args: tuple[Any, ...] = node.args
    if target in _OF_A_SHAPE:
        like = fake_value(args[0])
        args = torch.empty(like.shape, dtype=like.dtype), *args[1:]
    if any(each.op != "get_attr" for each in _nodes(args, node.kwargs)):
        return None
    read = fx.node.map_arg((args, node.kwargs), lambda each: getattr(module, str(each.target)))
    made = target(*read[0], **read[1])
    return made if isinstance(made, Tensor) else None


def _nodes(args: Any, kwargs: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), found.append)
    return found


def _keep(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    name = f"_folded_{node.name}"
    setattr(module, name, value)
    with module.graph.inserting_before(node):
        kept = module.graph.create_node("get_attr", name)
    kept.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(kept)
