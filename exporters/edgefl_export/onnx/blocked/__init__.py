"""Convolutions, and ops between them, on a blocked layout: channels in blocks of a register's size.

onnxruntime has kernels for that, the domain ``com.microsoft.nchwc``, and takes them by itself where weights are constants.
In training they are inputs. So the graph brings inputs and weights into that layout itself, with the op that onnxruntime has
for inputs, which knows how large a block is::

    x [N, C, H, W]    -> ReorderInput                              -> [N][C/b][H W][b]
    w [O, C, h, w]    -> ReorderInput                              -> [O][C/b][h w][b]
                      -> as [1, O, C h w, 1] -> ReorderInput       -> [O/b][C/b][h w][b][b]

What a convolution gives stays in that layout as long as what reads it has a form there
(:mod:`edgefl_export.onnx.blocked.images`), and comes out of it where something else reads it. All of these forms run on
as many threads as there are, and each thread finds in its cache what it made itself.
"""

from __future__ import annotations

import math

import onnx
from onnx import helper

from edgefl_export.onnx.blocked.convolution import Convolutions
from edgefl_export.onnx.blocked.images import Images, Norm
from edgefl_export.onnx.blocked.layout import BLOCK, ROOM, BlockedLayout
from edgefl_export.onnx.blocked.products import with_products
from edgefl_export.onnx.values import LAYOUT, GraphValues, live_peak

__all__ = ["BLOCK", "blocked"]


def blocked(model: bytes, room: float = ROOM) -> bytes | None:
    """Return the ONNX model with its spatial convolutions and large products on the blocked layout, or None.

    Ops between them are on it too if values then need at most ``room`` times their memory. Products:
    :mod:`edgefl_export.onnx.blocked.products`. None if nothing fits.
    """
    most = room * live_peak(GraphValues(onnx.load_from_string(model).graph))
    for through, products in ((True, True), (True, False), (False, True)):
        if form := _written(model, most, through=through, products=products):
            return form
    return _written(model, math.inf, through=False, products=False)


def _written(model: bytes, most: float, *, through: bool, products: bool) -> bytes | None:
    """Return the model on the layout, with ops ``through`` and with ``products``; None if nothing fits within ``most``
    numbers.
    """
    left = set[Norm]()
    while True:
        proto = onnx.load_from_string(model)
        layout = BlockedLayout(proto.graph)
        convolutions = Convolutions(layout)
        images = Images(proto.graph.node if through else (), layout, convolutions.fits, left)
        for node in proto.graph.node:
            taken = node.output[0] in layout.done or convolutions.add(node)
            if not (taken or (through and images.add(node))):
                layout.nodes.append(node)
        if not (torn := images.torn()):
            break
        left |= torn
    nodes = layout.finished({value.name for value in proto.graph.output})
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    count = convolutions.count + (with_products(proto.graph) if products else 0)
    if not count or live_peak(GraphValues(proto.graph)) > most:
        return None
    proto.opset_import.append(helper.make_opsetid(LAYOUT, 1))
    return bytes(proto.SerializeToString(deterministic=True))
