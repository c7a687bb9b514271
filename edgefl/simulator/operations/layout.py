"""Memory layouts that torch's CPU kernels prefer: channels last around convolutions, and the larger factor of a product
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from edgefl_export.capture.nodes import fake_value

_aten = torch.ops.aten
_IMAGES: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
    _aten.max_pool2d_with_indices_backward.default: (0, 1),
    _aten.avg_pool2d_backward.default: (0, 1),
}
"""Arguments that are images or kernels."""
_POOL = _aten.max_pool2d_with_indices.default
_MANY_CHANNELS = 16
"""Channels of an image that are enough for the vectors of a CPU."""
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})
_BOUND_TO_STRIDES = frozenset({_aten.as_strided.default, _aten.view.dtype})
_ADDED_ONE_BY_ONE = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten.native_batch_norm_backward.default,
        _aten.native_group_norm.default,
    }
    | {_aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats}
)
"""Means and deviations of images. With channels last torch adds them entry by entry, and loses one or two digits."""
_FEW_ROWS = 64
_MANY_WEIGHTS = 1 << 18


def channels_last(module: fx.GraphModule, images: Sequence[bool]) -> bool:
    """Convert the inputs of two-dimensional convolutions to the memory layout channels last, in place.

    A list with an operation whose values depend on the layout is not changed.

    Args:
        module: Recorded list of operations.
        images: True for each placeholder, in order, that may be an image or noise for one.

    Returns:
        True if the list was changed.
    """
    graph = module.graph
    targets = {node.target for node in graph.nodes}
    if targets & (_BOUND_TO_STRIDES | _ADDED_ONE_BY_ONE) or _aten.convolution.default not in targets:
        return False
    turned: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for given in [node for node, image in zip(inputs, images, strict=True) if image]:
        _turn(graph, given, turned)
    for node in list(graph.nodes):
        if node.target in _RESHAPES:
            node.target = _aten.reshape.default
            _turn(graph, node, turned)
    for node in list(graph.nodes):
        for place in _IMAGES.get(node.target, ()):
            given = node.args[place]
            if isinstance(given, fx.Node) and given not in turned.values() and _is_image(given):
                if given not in turned:
                    turned[given] = _last(graph, given)
                node.update_arg(place, turned[given])
    return True


def pools_channels_last(module: fx.GraphModule) -> None:
    """Run the max pools of a recorded list in the memory layout channels last, in place. Inputs and results keep their
    layout, and all bits are the same.

    Torch's kernel uses vectors only across the innermost dimension. Where an image has few channels, those of all images
    become one image with many.
    """
    graph = module.graph
    for pool in [node for node in graph.nodes if node.target is _POOL]:
        given: fx.Node = pool.args[0]
        maxima, _ = pool.meta["val"]
        if maxima.ndim != 4 or maxima.shape[2:].numel() == 1:  # one entry has no layout
            continue
        images, channels, *sides = fake_value(given).shape
        inner = given
        if is_flat := channels < _MANY_CHANNELS:
            inner = _after(graph, given, _aten.reshape.default, (given, [1, images * channels, *sides]))
        pool.update_arg(0, _last(graph, inner))
        pool.meta["val"] = _POOL(*fx.node.map_arg(pool.args, fake_value))
        for result in list(pool.users):
            result.meta["val"] = pool.meta["val"][result.args[1]]
            made = first = _after(graph, result, _aten.contiguous.default, (result,))
            if is_flat:
                made = _after(graph, first, _aten.reshape.default, (first, list(maxima.shape)))
            result.replace_all_uses_with(made, delete_user_cb=lambda reader, first=first: reader is not first)


def _turn(graph: fx.Graph, given: fx.Node, turned: dict[fx.Node, fx.Node]) -> None:
    """Insert a conversion to channels last behind ``given`` if it is an image, for all its readers. Record it in
    ``turned``.
    """
    if not _is_image(given):
        return
    turned[given] = _last(graph, given)
    given.replace_all_uses_with(turned[given], delete_user_cb=lambda reader: reader is not turned[given])


def _is_image(node: fx.Node) -> bool:
    return fake_value(node).ndim == 4 and fake_value(node).is_floating_point()


def _last(graph: fx.Graph, given: fx.Node) -> fx.Node:
    return _after(graph, given, _aten.contiguous.default, (given,), memory_format=torch.channels_last)


def _after(
    graph: fx.Graph, given: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], **more: Any
) -> fx.Node:
    with graph.inserting_after(given):
        made = graph.call_function(target, args, more)
    made.meta["val"] = target(*fx.node.map_arg(args, fake_value), **more)
    return made


def large_first(module: fx.GraphModule) -> None:
    """Replace a dense layer ``x W^T`` with few rows and many weights by ``(W x^T)^T``, in place.

    The result is equal, but faster.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not _aten.addmm.default or node.kwargs:
            continue
        bias, rows, turned = node.args
        if turned.target is not _aten.t.default or fake_value(bias).ndim != 1:
            continue
        weights = turned.args[0]
        if fake_value(rows).shape[0] > _FEW_ROWS or fake_value(weights).numel() < _MANY_WEIGHTS:
            continue
        with graph.inserting_before(node):
            column = graph.call_function(_aten.unsqueeze.default, (bias, 1))
            other = graph.call_function(_aten.t.default, (rows,))
            product = graph.call_function(_aten.addmm.default, (column, weights, other))
            made = graph.call_function(_aten.t.default, (product,))
        for each, value in ((column, fake_value(bias)[:, None]), (other, fake_value(rows).t())):
            each.meta["val"] = value
        product.meta["val"], made.meta["val"] = fake_value(node).t(), fake_value(node)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()
