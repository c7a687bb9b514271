"""The blob of a bundle that tells, for each node of each graph, its module, its phase and what it computes.

::

    graphs["train"] = onnx_nodes(captured, artifact.model)
    ref, data = packed_sources(graphs, chunk_bytes)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from torch import Tensor, fx

from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle import sources
from edgefl.wire.bundle.sources import Node
from edgefl.wire.compression import packed
from exporters.capture.nodes import results
from exporters.capture.trace import Captured
from exporters.memory.recompute import flops
from exporters.sources.attribution import Nodes, Op


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of ONNX first, then of the core ops of torch.
_MOVES = _words(
    "Cast Concat Expand Flatten Gather Identity Pad Reshape Slice Split Squeeze Tile Transpose Unsqueeze "
    "_to_copy cat clone constant_pad_nd expand index_select permute reshape select slice split split_with_sizes squeeze "
    "t transpose unsqueeze view"
)
_ELEMENTWISE = _words(
    "Abs Add Ceil Clip Div Equal Erf Exp Floor Greater GreaterOrEqual HardSigmoid Less LessOrEqual Log Max Min Mul Neg Not "
    "Pow Reciprocal Round Sign Sqrt Sub Where "
    "abs add addcdiv addcmul ceil clamp div eq exp floor ge gt le log lt maximum minimum mul neg positive pow reciprocal "
    "round rsqrt rsub sign sqrt sub where"
)


def onnx_nodes(captured: Captured, model: bytes) -> dict[str, Node]:
    """The nodes of an ONNX model by their names."""
    graph = onnx.load_from_string(model).graph
    shapes = _shapes(graph) | _held_back(graph)
    sizes = {name: shape for name, (shape, _) in shapes.items()}
    ops = tuple(_onnx_op(node, shapes, sizes) for node in graph.node)
    names = [value.name for value in graph.output]
    return Nodes(ops, dict(zip(captured.outputs, names, strict=True))).attributed()


def program_nodes(captured: Captured, graph: fx.Graph, instructions: Mapping[str, int]) -> dict[str, Node]:
    """The nodes of ``graph``, rewritten from ``captured``, that a program runs, named by the first of the ``instructions``
    that run each: ``12:mul_3``."""
    nodes = graph_nodes(captured, graph)
    return {f"{first}:{name}": nodes[name] for name, first in instructions.items()}


def packed_sources(graphs: Mapping[str, Mapping[str, Node]], chunk: int) -> tuple[BlobRef, bytes]:
    """The blob of all graphs, as it is stored: (reference, bytes)."""
    return packed(sources.encode(sources.of(graphs)), chunk)


# -- ONNX --------------------------------------------------------------------------------------------------------


def _shapes(graph: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of an entry by value."""
    shapes = {tensor.name: (tuple(tensor.dims), _width(tensor.data_type)) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        shapes[value.name] = (tuple(dim.dim_value for dim in kind.shape.dim), _width(kind.elem_type))
    return shapes


def _held_back(graph: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Those of values that wait for a gradient (``edgefl::after``): a Reshape whose shape is a sum with a constant, and
    which does not tell its result."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    constants |= {name: node.attribute[0].t for name, node in made.items() if _is_tensor(node)}
    sums = {name: node for name, node in made.items() if node.op_type == "Add"}
    shapes = _shapes(graph)
    late_shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    for node in graph.node:
        if node.op_type != "Reshape" or node.input[1] not in sums:
            continue
        summands = [constants[name] for name in sums[node.input[1]].input if name in constants]
        width = shapes.get(node.input[0], late_shapes.get(node.input[0], ((), 4)))[1]
        if summands:
            late_shapes[node.output[0]] = (
                tuple(map(int, onnx.numpy_helper.to_array(summands[0]).reshape(-1))),
                width,
            )
    return late_shapes


def _is_tensor(node: Any) -> bool:
    return bool(node.op_type == "Constant" and node.attribute[0].name == "value")


def _width(element: int) -> int:
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element)).itemsize) if element else 4


def _onnx_op(
    node: Any, shapes: Mapping[str, tuple[tuple[int, ...], int]], sizes: Mapping[str, tuple[int, ...]]
) -> Op:
    touched = [shapes[name] for name in (*node.input, *node.output) if name in shapes]
    return Op(
        name=node.name,
        op=node.op_type,
        reads=tuple(filter(None, node.input)),
        makes=tuple(filter(None, node.output)),
        macs=_onnx_macs(node, sizes),
        nbytes=sum(math.prod(shape) * width for shape, width in touched),
        elementwise=node.op_type in _ELEMENTWISE,
        moves=node.op_type in _MOVES,
    )


_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


def _onnx_macs(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    read = [shapes.get(name, ()) for name in node.input]
    made = shapes.get(node.output[0], ())
    if node.op_type in _PRODUCTS and not all(read[:2]):
        return 0  # the body of a Scan does not tell all shapes
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "MatMul":
        return math.prod(made) * read[0][-1]
    if node.op_type == "Gemm":
        turned = "transA" in attributes and attributes["transA"].i
        return math.prod(made) * read[0][0 if turned else 1]
    if node.op_type in ("Conv", "ConvTranspose"):
        return math.prod(made if node.op_type == "Conv" else read[0]) * math.prod(read[1][1:])
    if node.op_type == "Scan":
        return _scan_macs(attributes, read)
    return 0


def _scan_macs(attributes: Mapping[str, Any], read: Sequence[tuple[int, ...]]) -> int:
    """Those of the body, as often as its sequences have entries."""
    body, steps = attributes["body"].g, read[-1][0] if read and read[-1] else 1
    inside = {name: shape for name, (shape, _) in _shapes(body).items()}
    return steps * sum(_onnx_macs(node, inside) for node in body.node if set(node.input) & inside.keys())


# -- captured graphs ---------------------------------------------------------------------------------------------


def graph_nodes(captured: Captured, graph: fx.Graph) -> dict[str, Node]:
    """The nodes of ``graph``, which is that of ``captured`` or was rewritten from it, by their names."""
    ports = [node for node in graph.nodes if node.op == "placeholder"]
    names = {node: name for node, name in zip(ports, captured.inputs, strict=True)}
    ops = tuple(_graph_op(node, names) for node in graph.nodes if node.op == "call_function")
    outputs = {port: node.name for port, node in zip(captured.outputs, results(graph), strict=True)}
    return Nodes(ops, outputs).attributed()


def _graph_op(node: fx.Node, names: Mapping[fx.Node, str]) -> Op:
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    op = name if name in _MOVES else name.removesuffix("_copy")
    values = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    return Op(
        name=node.name,
        op=op,
        reads=tuple(names.get(each, each.name) for each in node.all_input_nodes),
        makes=(node.name,),
        macs=int(flops(node)) // 2,
        nbytes=sum(value.nbytes for value in values if isinstance(value, Tensor)),
        elementwise=op in _ELEMENTWISE,
        moves=op in _MOVES,
    )
