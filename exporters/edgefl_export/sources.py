"""Sources blob of a bundle: for each node of each graph, its module, its phase and the op that it computes.

::

    graphs["train"] = onnx_nodes(captured, artifact.model)
    ref, data = packed_sources(graphs, chunk_bytes)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from torch import Tensor, fx

from edgefl.wire.blobs import BlobRef, compress
from edgefl.wire.bundle import sources
from edgefl.wire.bundle.sources import OpOrigin, Phase
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import results
from edgefl_export.memory.recompute import flops

# Module and phase of each node of a training graph, inferred from the graph itself.
#
# Tracing, decompositions and clean-ups leave no names of modules on nodes, but the ports keep those of the weights:
#
# - ``forward``: what the loss and the other metrics are computed from.
# - ``update``: what turns gradients into new state: walking back from the state outputs, the element-wise ops that are not
#   forward. Moving statistics are among them.
# - ``backward``: the rest. Recomputed activations are among it, and the second pass of a method that takes two gradients.
# - module: that of the weight that the node reads, or whose gradient it makes. Any other node serves who reads its result in
#   the backward pass and where it moves data, and who made its operands in the forward pass.

LOSS = "metric.loss"
_STATE = ("state.", "update.", "weights.")
_WEIGHT = re.compile(r"(state\.)?weights\.|update\.")
_PARTS = re.compile(r"[./]")


@dataclass(frozen=True)
class OpNode:
    """Node of an ONNX or captured graph.

    Attributes:
        name: name of the node.
        op: name of its operator.
        reads: names of the values that it reads.
        makes: names of the values that it computes.
        macs: number of its multiply-accumulates.
        nbytes: bytes of the values that it reads and computes.
        elementwise: it computes each entry from the entries at the same index.
        moves: it copies entries without arithmetic.
    """

    name: str
    op: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    macs: int = 0
    nbytes: int = 0
    elementwise: bool = False
    moves: bool = False


@dataclass(frozen=True)
class GraphNodes:
    """Ops of a graph in order. ``outputs`` has the name of the value of each output port."""

    ops: tuple[OpNode, ...]
    outputs: Mapping[str, str] = field(default_factory=dict)

    def attributed(self) -> dict[str, OpOrigin]:
        """Return the entry (op, phase, module, work) of each op by name; phase and module are inferred from the weights
        that it reads.
        """
        phases = _phases(self)
        modules = _modules(self, phases)
        return {
            op.name: OpOrigin(op.op, phases[op.name], modules[op.name], op.macs, op.nbytes) for op in self.ops
        }


def _phases(nodes: GraphNodes) -> dict[str, Phase]:
    maker = _makers(nodes.ops)
    metrics = [value for port, value in nodes.outputs.items() if port.startswith("metric.")]
    losses = [value for port, value in nodes.outputs.items() if port == LOSS] or metrics
    states = [value for port, value in nodes.outputs.items() if port.startswith(_STATE)]
    forward = _ancestors(losses or list(nodes.outputs.values()), maker)
    forward |= _ancestors(metrics, maker) - _ancestors(states, maker)
    update = _ancestors(states, maker, stops=lambda op: op.name in forward or not op.elementwise)
    phases: dict[str, Phase] = {}
    for op in nodes.ops:
        phases[op.name] = "forward" if op.name in forward else "update" if op.name in update else "backward"
    return phases


def _makers(ops: Iterable[OpNode]) -> dict[str, OpNode]:
    return {value: op for op in ops for value in op.makes}


def _ancestors(
    values: Sequence[str], maker: Mapping[str, OpNode], stops: Callable[[OpNode], bool] = lambda _: False
) -> set[str]:
    """Return the names of the ops that ``values`` are computed from; ``maker`` has the op that computes each value.

    The search does not go beyond an op with ``stops(op)``, which is left out.
    """
    names: set[str] = set()
    open_values = list(values)
    while open_values:
        op = maker.get(open_values.pop())
        if op is not None and op.name not in names and not stops(op):
            names.add(op.name)
            open_values += op.reads
    return names


def _modules(nodes: GraphNodes, phases: Mapping[str, Phase]) -> dict[str, str]:
    """Return the module path of each op by its name; "" if it cannot be inferred.

    An op takes the module of the weight that it reads or whose gradient it computes. Other ops that move data or are in
    the backward pass take that of a reader of their results, and the rest that of an op whose result they read.
    """
    attribution = _weight_modules(nodes)
    readers: dict[str, list[OpNode]] = {}
    for op in nodes.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    maker = _makers(nodes.ops)
    for op in reversed(nodes.ops):
        if (op.moves or phases[op.name] == "backward") and not attribution.get(op.name):
            after = (
                attribution.get(reader.name, "") for value in op.makes for reader in readers.get(value, ())
            )
            attribution[op.name] = next(filter(None, after), "")
    for op in nodes.ops:
        if not attribution.get(op.name):
            before = (
                attribution.get(maker[value].name, "") for value in reversed(op.reads) if value in maker
            )
            attribution[op.name] = next(filter(None, before), "")
    return attribution


def _weight_modules(nodes: GraphNodes) -> dict[str, str]:
    """Return the module by op name for ops that name a weight: they read it, or compute its gradient or new value.

    A weight also counts as read if ops that only move data lie between.
    """
    ports = {value: port for port, value in nodes.outputs.items()}
    named = [*nodes.outputs, *(value for op in nodes.ops for value in op.reads if value not in ports)]
    known = {_weight_of(port) for port in named} - {""}
    served: dict[str, str] = {}
    modules: dict[str, str] = {}

    def of(value: str) -> str:
        return _module_of_port(ports.get(value, value), known)

    for op in nodes.ops:
        module = next(filter(None, (of(value) or served.get(value, "") for value in op.reads)), "")
        if module:
            modules[op.name] = module
            if op.moves:
                served |= dict.fromkeys(op.makes, module)
    maker = _makers(nodes.ops)
    for port, value in nodes.outputs.items():
        if module := _module_of_port(port, known):
            for name in _ops_behind(value, maker):
                modules.setdefault(name, module)
    return modules


def _ops_behind(value: str, maker: Mapping[str, OpNode]) -> set[str]:
    """Return the names of the ops behind ``value``, back through data movement and element-wise ops.

    The first op of another type on each path is the last one that is included. ``maker`` has the op that computes each
    value.
    """
    names: set[str] = set()
    open_values = [value]
    while open_values:
        op = maker.get(open_values.pop())
        if op is not None and op.name not in names:
            names.add(op.name)
            open_values += op.reads if op.moves or op.elementwise else ()
    return names


def _weight_of(port: str) -> str:
    """Return the module of a weight's port: ``state.weights.layer1.conv.weight`` -> ``layer1.conv``; "" for other ports."""
    prefix = _WEIGHT.match(port)
    return port[prefix.end() :].rpartition("/")[2].rpartition(".")[0] if prefix else ""


def _module_of_port(port: str, known: Collection[str]) -> str:
    """Return the module in ``known`` whose weight a state port accompanies, or "" for other ports.

    ``state.adam.m.layer1.conv.weight`` -> ``layer1.conv``; longer paths are tried first.
    """
    if not port.startswith(_STATE):
        return ""
    parts = _PARTS.split(port.rpartition(".")[0])
    return next(filter(known.__contains__, (".".join(parts[at:]) for at in range(1, len(parts)))), "")


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


def onnx_nodes(lowered: LoweredGraph, model: bytes) -> dict[str, OpOrigin]:
    """Return the nodes of the ONNX bytes ``model``, written from ``lowered``, by their names."""
    graph = onnx.load_from_string(model).graph
    shapes = _shapes(graph) | _held_back(graph)
    sizes = {name: shape for name, (shape, _) in shapes.items()}
    ops = tuple(_onnx_op(node, shapes, sizes) for node in graph.node)
    names = [value.name for value in graph.output]
    return GraphNodes(ops, dict(zip(lowered.outputs, names, strict=True))).attributed()


def program_nodes(
    lowered: LoweredGraph, graph: fx.Graph, instructions: Mapping[str, int]
) -> dict[str, OpOrigin]:
    """Return the nodes of an ExecuTorch program, named by instruction and node: ``12:mul_3``.

    Args:
        lowered: the captured graph, for the names of ports.
        graph: the graph that the program was written from.
        instructions: first instruction that runs a node, by the name of the node.
    """
    nodes = graph_nodes(lowered, graph)
    return {f"{first}:{name}": nodes[name] for name, first in instructions.items()}


def packed_sources(graphs: Mapping[str, Mapping[str, OpOrigin]], chunk: int) -> tuple[BlobRef, bytes]:
    """Return (reference, compressed bytes) of the blob that lists module, phase and op of each node of a bundle's
    graphs.

    Args:
        graphs: nodes by name, for each graph by its name.
        chunk: chunk size of the blob in bytes.
    """
    return compress(sources.encode(sources.make_sources(graphs)), chunk)


# -- ONNX --------------------------------------------------------------------------------------------------------


def _shapes(graph: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shape and the bytes per entry of each named value of an ONNX graph."""
    shapes = {tensor.name: (tuple(tensor.dims), _width(tensor.data_type)) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        shapes[value.name] = (tuple(dim.dim_value for dim in kind.shape.dim), _width(kind.elem_type))
    return shapes


def _held_back(graph: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shape and the bytes per entry of values that ``edgefl::after`` delays until a gradient is computed.

    Each is a Reshape whose shape is a sum with a constant, so that ONNX cannot infer the shape of the result.
    """
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
) -> OpNode:
    touched = [shapes[name] for name in (*node.input, *node.output) if name in shapes]
    return OpNode(
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
        return 0  # some shapes within a Scan are unknown
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
    """Return the multiply-accumulates of a Scan: those of its body times the length of its sequences."""
    body, steps = attributes["body"].g, read[-1][0] if read and read[-1] else 1
    inside = {name: shape for name, (shape, _) in _shapes(body).items()}
    return steps * sum(_onnx_macs(node, inside) for node in body.node if set(node.input) & inside.keys())


# -- captured graphs ---------------------------------------------------------------------------------------------


def graph_nodes(lowered: LoweredGraph, graph: fx.Graph) -> dict[str, OpOrigin]:
    """Return the nodes of ``graph`` by name; it is the graph of ``lowered`` or was rewritten from it with equal ports."""
    ports = [node for node in graph.nodes if node.op == "placeholder"]
    names = {node: name for node, name in zip(ports, lowered.inputs, strict=True)}
    ops = tuple(_graph_op(node, names) for node in graph.nodes if node.op == "call_function")
    outputs = {port: node.name for port, node in zip(lowered.outputs, results(graph), strict=True)}
    return GraphNodes(ops, outputs).attributed()


def _graph_op(node: fx.Node, names: Mapping[fx.Node, str]) -> OpNode:
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    op = name if name in _MOVES else name.removesuffix("_copy")
    values = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    return OpNode(
        name=node.name,
        op=op,
        reads=tuple(names.get(each, each.name) for each in node.all_input_nodes),
        makes=(node.name,),
        macs=int(flops(node)) // 2,
        nbytes=sum(value.nbytes for value in values if isinstance(value, Tensor)),
        elementwise=op in _ELEMENTWISE,
        moves=op in _MOVES,
    )
