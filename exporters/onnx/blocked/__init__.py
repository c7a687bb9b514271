"""Convolutions, and what is between them, on a blocked layout: channels in blocks of as many numbers as a processor's
registers hold.

onnxruntime has kernels for that, the domain ``com.microsoft.nchwc``, and takes them by itself where weights are constants.
In training they are inputs. So the graph brings inputs and weights into that layout itself, with the op that onnxruntime has
for inputs, which knows how large a block is::

    x [N, C, H, W]    -> ReorderInput                              -> [N][C/b][H W][b]
    w [O, C, h, w]    -> ReorderInput                              -> [O][C/b][h w][b]
                      -> as [1, O, C h w, 1] -> ReorderInput       -> [O/b][C/b][h w][b][b]

What a convolution gives stays in that layout as long as what reads it has a form there
(:mod:`exporters.onnx.blocked.images`), and comes out of it where something else reads it. All of these forms run on as many
threads as there are, and each thread finds in its cache what it made itself.
"""

from __future__ import annotations

import onnx
from onnx import helper

from exporters.onnx.blocked.convolution import Convolutions
from exporters.onnx.blocked.images import Images
from exporters.onnx.blocked.layout import BLOCK, DOMAIN, Layout

__all__ = ["BLOCK", "DOMAIN", "blocked"]


def blocked(model: bytes) -> bytes | None:
    """The ONNX model with its spatial convolutions on the blocked layout, and what is between them; None where none fits."""
    proto = onnx.load_from_string(model)
    layout = Layout(proto.graph)
    convolutions = Convolutions(proto.graph, layout)
    images = Images(proto.graph.node, layout, convolutions.fits)
    for node in proto.graph.node:
        if not (convolutions.add(node) or images.add(node)):
            layout.nodes.append(node)
    if not convolutions.count:
        return None
    nodes = layout.finished({value.name for value in proto.graph.output})
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return bytes(proto.SerializeToString(deterministic=True))
