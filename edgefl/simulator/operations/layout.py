"""Convolutions with channels innermost, which torch's kernels for processors multiply and pool fastest."""

from __future__ import annotations

import torch
from torch import fx

from exporters.capture.nodes import fake_value

_aten = torch.ops.aten
_TENSORS = {_aten.convolution.default: (0, 1), _aten.convolution_backward.default: (0, 1, 2)}
"""Arguments that are images or kernels."""
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})
_BOUND_TO_STRIDES = frozenset({_aten.as_strided.default, _aten.view.dtype})


def channels_last(module: fx.GraphModule) -> None:
    """Lay out what two-dimensional convolutions read so; all else follows by itself. A list with ops whose values are those
    of a layout stays as it is."""
    graph = module.graph
    targets = {node.target for node in graph.nodes}
    if targets & _BOUND_TO_STRIDES or not targets & {*_TENSORS}:
        return
    turned: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in _RESHAPES:
            node.target = _aten.reshape.default
        for place in _TENSORS.get(node.target, ()):
            given = node.args[place]
            if isinstance(given, fx.Node) and fake_value(given).ndim == 4:
                if given not in turned:
                    with graph.inserting_after(given):
                        turned[given] = graph.call_function(
                            _aten.contiguous.default, (given,), {"memory_format": torch.channels_last}
                        )
                    turned[given].meta["val"] = given.meta["val"]
                node.update_arg(place, turned[given])
