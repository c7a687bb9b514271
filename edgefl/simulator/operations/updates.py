"""Fusion of optimizer steps into fewer passes over the weights: ``w - lr * g`` in one pass, or in the product that gives
g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from edgefl_export.capture.nodes import fake_value, node_argument, results

_aten = torch.ops.aten
_PRODUCTS: Mapping[Any, Any] = {
    _aten.mm.default: _aten.addmm.default,
    _aten.bmm.default: _aten.baddbmm.default,
}
_IN_PLACE: Mapping[Any, Any] = {
    _aten.addmm.default: _aten.addmm_.default,
    _aten.baddbmm.default: _aten.baddbmm_.default,
    _aten.addcmul.default: _aten.addcmul_.default,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
}


def fuse(module: fx.GraphModule) -> None:
    """Fuse operations of ``module``, a recorded list of operations, in place.

    ``w - rate * g`` and ``c * a + b`` become one operation each, and masks become thresholds.
    """
    negated: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target is _aten.sub.Tensor and len(node.args) == 2 and not node.kwargs:
            _descent(module.graph, node, negated)
        elif node.target is _aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
            _sum_with_multiple(node)
        elif node.target is _aten.where.self:
            _use_threshold(module, node)
    module.graph.eliminate_dead_code()


def _descent(graph: fx.Graph, node: fx.Node, negated: dict[fx.Node, fx.Node]) -> None:
    """Fuse ``node``, if it computes ``w - rate * g`` with ``rate`` a scalar tensor. ``negated`` caches the node
    ``-rate`` by ``rate``.
    """
    weights, multiple = node.args
    if not _only(multiple, _aten.mul.Tensor):
        return
    first, second = sorted(cast(fx.Node, multiple).args, key=lambda each: not _is_scalar(each))
    if not _is_scalar(first) or not all(_alike(each, node) for each in (weights, second)):
        return
    rate, gradient = cast(fx.Node, first), cast(fx.Node, second)
    if _only(gradient, *_PRODUCTS):
        if rate not in negated:
            with graph.inserting_after(rate):
                negated[rate] = _new(graph, _aten.neg.default, (rate,), rate)
        made = _fuse_product(graph, node, gradient, negated[rate])
    else:
        with graph.inserting_before(node):
            made = _new(graph, _aten.addcmul.default, (weights, rate, gradient), node, {"value": -1})
    node.replace_all_uses_with(made)


def _fuse_product(graph: fx.Graph, node: fx.Node, product: fx.Node, rate: fx.Node) -> fx.Node:
    """Insert operations for ``w + rate * (a b)`` before ``node`` and return the last of them.

    ``w`` is the first argument of ``node``, and ``product`` is the node of ``a b``. ``rate`` multiplies the smaller factor
    instead of the product.
    """
    left, right = node_argument(product, 0), node_argument(product, 1)
    with graph.inserting_before(node):
        if fake_value(left).numel() <= fake_value(right).numel():
            left = _new(graph, _aten.mul.Tensor, (left, rate), left)
        else:
            right = _new(graph, _aten.mul.Tensor, (right, rate), right)
        return _new(graph, _PRODUCTS[product.target], (node.args[0], left, right), node)


def _sum_with_multiple(node: fx.Node) -> None:
    """Fuse ``c * a + b``, where c is a number, into one operation."""
    for multiple, other in (node.args, tuple(reversed(node.args))):
        if not _only(multiple, _aten.mul.Tensor):
            continue
        whole, number = cast(fx.Node, multiple).args
        if isinstance(number, float) and all(_alike(each, node) for each in (whole, other)):
            node.args, node.kwargs = (other, whole), {"alpha": number}
            return


def _use_threshold(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace ``node`` by torch's threshold operation, which is faster, if it computes ``where(x >= c, y, 0)``. Dropout
    does.
    """
    mask, kept, otherwise = node.args
    if not (isinstance(mask, fx.Node) and mask.target is _aten.ge.Scalar and _is_zero(module, otherwise)):
        return
    noise, least = mask.args
    if not all(_alike(each, node) for each in (noise, kept)) or fake_value(node).dtype != torch.float32:
        return
    below = float(np.nextafter(np.float32(least), np.float32(-np.inf)))  # type: ignore[arg-type]
    with module.graph.inserting_before(node):
        made = _new(module.graph, _aten.threshold_backward.default, (kept, noise, below), node)
    node.replace_all_uses_with(made)


def _is_zero(module: fx.GraphModule, node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target is _aten.zeros_like.default or (
        node.op == "get_attr" and not getattr(module, str(node.target)).any()
    )


def _new(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: Any,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    made = graph.call_function(target, args, kwargs or {})
    made.meta["val"] = fake_value(like)
    return made


def _only(node: object, *targets: Any) -> bool:
    """Return True if ``node`` calls one of the operations ``targets`` and exactly one node reads its result."""
    return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1


def _is_scalar(node: object) -> bool:
    return isinstance(node, fx.Node) and fake_value(node).ndim == 0 and fake_value(node).is_floating_point()


def _alike(node: object, like: fx.Node) -> bool:
    if not isinstance(node, fx.Node):
        return False
    found, wanted = fake_value(node), fake_value(like)
    return found.shape == wanted.shape and found.dtype == wanted.dtype and found.is_floating_point()


# -- memory ------------------------------------------------------------------------------------------------------


def own_results(module: fx.GraphModule, owned: Sequence[bool]) -> None:
    """Give each result of ``module`` that is ``owned`` its own memory, so that the caller may overwrite it.

    Copies of other results are removed.

    Results in bfloat16 are converted to float32, because the outputs of graphs are never bfloat16.

    Args:
        module: Recorded list of operations, changed in place.
        owned: For each result, in order, True if it needs its own memory.
    """
    graph, output = module.graph, module.graph.output_node()
    found: list[fx.Node] = []
    for node, own in zip(results(graph), owned, strict=True):
        shared = node in found or node.op != "call_function" or _is_view(node)
        with graph.inserting_before(output):
            if fake_value(node).dtype == torch.bfloat16:
                made = _new(graph, _aten._to_copy.default, (node,), node, {"dtype": torch.float32})
            elif own and shared:
                made = _new(
                    graph, _aten.clone.default, (node,), node, {"memory_format": torch.contiguous_format}
                )
            else:
                made = node
        copied = not own and made.target is _aten.clone.default
        found.append(node_argument(made, 0) if copied else made)
    output.args = (tuple(found),)
    graph.eliminate_dead_code()


def in_place(module: fx.GraphModule, replaced: Mapping[int, int]) -> None:
    """Let operations write results over those inputs that the results replace, where no later operation reads the input.

    The caller must not use such an input afterwards.

    Args:
        module: Recorded list of operations, changed in place.
        replaced: Index of the result that replaces a placeholder, by the placeholder's index.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    made = results(module.graph)
    for number, result in replaced.items():
        old, new = cast(fx.Node, inputs[number]), made[result]
        if new.target in _IN_PLACE and new.args[0] is old and _last(old, new, order):
            new.target = _IN_PLACE[new.target]


def _last(old: fx.Node, new: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Return True if ``new`` may overwrite ``old``: no node after ``new`` reads ``old`` or a view of it, and ``new``
    reads no view of it.
    """
    views = [old]
    for view in views:  # which grows
        for reader in view.users:
            if reader is new and view is old:
                continue
            if (
                order.get(reader, len(order)) > order.get(new, len(order))
                or reader.op == "output"
                or reader is new
            ):
                return False
            if _is_view(reader):
                views.append(reader)
    return sum(argument is old for argument in new.args) == 1


def _is_view(node: fx.Node) -> bool:
    """Return True if the result of ``node`` may share memory with an argument."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(each.alias_info is not None for each in schema.returns)
