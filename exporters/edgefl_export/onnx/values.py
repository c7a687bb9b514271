"""Values of an ONNX graph: maker, readers, shape and type of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

Shape = tuple[int, ...]

LAYOUT = "com.microsoft.nchwc"
"""The domain of onnxruntime's ops on blocked channels."""
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
LOGICAL = frozenset(
    {"And", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "Or"}
)
"""Ops by entry that give truth values."""
BY_ENTRY = LOGICAL | frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu"),
        *("Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log"),
        *("Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Round"),
        *("Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Tanh"),
        "Where",
    }
)
"""Ops whose every entry is made of the same entries of their inputs, each input being repeated where it is smaller."""


class GraphValues:
    """Values of an ONNX graph by name.

    Attributes:
        graph: the graph.
        inputs: names of the graph's inputs.
        outputs: names of the graph's outputs.
        constants: constants by name.
        types: ONNX type of the entries of a value; 0 if it is unknown.
        shapes: shapes of the values with known sizes, also of delayed ones (:mod:`edgefl_export.operators`), of which ONNX
            knows only the rank.
        places: position of the node that computes a value.
        readers: positions of the nodes that read a value.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        values = (*graph.value_info, *graph.input, *graph.output)
        self.inputs = {value.name for value in graph.input}
        self.outputs = {value.name for value in graph.output}
        self.constants: Mapping[str, TensorProto] = {each.name: each for each in graph.initializer}
        self.types: dict[str, int] = {value.name: value.type.tensor_type.elem_type for value in values}
        self.types |= {name: each.data_type for name, each in self.constants.items()}
        self.shapes: dict[str, Shape] = {name: tuple(each.dims) for name, each in self.constants.items()}
        for value in values:
            sizes = tuple(size.dim_value for size in value.type.tensor_type.shape.dim)
            if value.type.tensor_type.HasField("shape") and all(sizes):
                self.shapes[value.name] = sizes
        self.places: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for place, node in enumerate(graph.node):
            self.places |= dict.fromkeys(node.output, place)
            for name in read_by(node):
                self.readers.setdefault(name, []).append(place)
            self._infer(node)

    def maker(self, name: str, op: str = "") -> NodeProto | None:
        """Return the node that computes the value ``name``; None if it is an input or a constant of the graph.

        With ``op``, also return None if the node is no ``op`` of the default domain.
        """
        place = self.places.get(name)
        node = None if place is None else self.graph.node[place]
        return node if node is None or not op or (node.op_type == op and not node.domain) else None

    def read_at(self, name: str) -> list[NodeProto]:
        """Return the nodes that read a value, in order."""
        return [self.graph.node[place] for place in self.readers.get(name, ())]

    def whole(self, name: str) -> Shape | None:
        """Return the entries of a constant of int64; None for other values."""
        constant = self.constants.get(name)
        if constant is None or constant.data_type != TensorProto.INT64:
            return None
        return tuple(int(each) for each in np.ravel(numpy_helper.to_array(constant)))

    def count(self, name: str) -> int:
        """Return the number of entries of a value; 0 if it is unknown."""
        return math.prod(self.shapes[name]) if name in self.shapes else 0

    def waiting(self, node: NodeProto) -> Shape | None:
        """Return the shape of the result if ``node`` delays a value (:func:`edgefl_export.onnx.ops.after`), else None."""
        sizes = self.maker(node.input[1], "Add") if node.op_type == "Reshape" else None
        nothing = self.maker(sizes.input[1], "Mul") if sizes else None
        cast = self.maker(nothing.input[0], "Cast") if nothing else None
        if sizes is None or nothing is None or cast is None or self.maker(cast.input[0], "IsNaN") is None:
            return None
        return self.whole(sizes.input[0]) if self.whole(nothing.input[1]) == (0,) else None

    def is_waited_for(self, name: str) -> bool:
        """Return True if the value serves only to delay other nodes: no node reads more than its first entry."""
        return name not in self.outputs and all(
            node.op_type == "Slice" and list(map(self.whole, node.input[1:])) == [(0,), (1,)]
            for node in self.read_at(name)
        )

    def _infer(self, node: NodeProto) -> None:
        result, given = node.output[0], [self.shapes.get(name) for name in node.input]
        if not self.types.get(result, 0):
            self.types[result] = self._type(node)
        if result in self.shapes or node.domain not in ("", LAYOUT):
            return
        if node.domain:
            shape = self._on_layout(node, given[0], given[1] if len(given) > 1 else None)
        elif node.op_type == "Reshape":
            shape = self._reshaped(node, given[0])
        elif node.op_type in BY_ENTRY:
            known = [each for each in given if each is not None]
            shape = np.broadcast_shapes(*known) if len(known) == len(given) else None
        else:
            shape = None
        if shape is not None:
            self.shapes[result] = shape

    def _reshaped(self, node: NodeProto, given: Shape | None) -> Shape | None:
        sizes = self.waiting(node) or self.whole(node.input[1])
        if sizes is None or 0 in sizes:
            return None
        if -1 not in sizes:
            return sizes
        if given is None:
            return None
        rest = math.prod(given) // max(1, -math.prod(sizes))
        return tuple(rest if size == -1 else size for size in sizes)

    def _on_layout(self, node: NodeProto, given: Shape | None, kernel: Shape | None) -> Shape | None:
        """Return the shape of the result of a node on the blocked layout (NCHWc), [N, C, H, W] or channels last.

        ``given`` is the shape of its input, ``kernel`` that of a convolution's kernel [O, C, h, w].
        """
        options = attributes(node)
        if given is None:
            return None
        last = options.get("channels_last", 0)
        axes = {"ReorderInput": (0, 3, 1, 2), "ReorderOutput": (0, 2, 3, 1)}.get(node.op_type)
        if axes is not None:
            return tuple(given[axis] for axis in axes) if last else given
        padded = options.get("auto_pad", b"NOTSET") == b"NOTSET"
        if node.op_type == "Conv" and kernel is not None and padded:
            return _convolved(given, kernel, options)
        return (*given[:2], 1, 1) if node.op_type == "GlobalAveragePool" else None

    def _type(self, node: NodeProto) -> int:
        """Return the element type (ONNX's number) of a node's result.

        Return 0 if it does not follow from the op and its operands.
        """
        if node.op_type == "Cast":
            return int(attributes(node)["to"])
        if node.op_type in LOGICAL:
            return int(TensorProto.BOOL)
        same = node.domain == LAYOUT or node.op_type in BY_ENTRY | VIEWS
        first = node.input[1 if node.op_type == "Where" else 0] if node.input else ""
        return self.types.get(first, 0) if same else 0


def _convolved(given: Shape, kernel: Shape, options: Mapping[str, Any]) -> Shape:
    pads, ones = options.get("pads", [0] * 4), [1, 1]
    axes = zip(
        given[2:],
        kernel[2:],
        options.get("strides", ones),
        options.get("dilations", ones),
        (pads[0] + pads[2], pads[1] + pads[3]),
        strict=True,
    )
    sizes = ((size + pad - step * (width - 1) - 1) // stride + 1 for size, width, stride, step, pad in axes)
    return (given[0], kernel[0], *sizes)


def read_by(node: NodeProto) -> set[str]:
    """Return the names that a node reads, including those that the bodies of its loops read."""
    bodies = [each.g for each in node.attribute if each.type == AttributeProto.GRAPH]
    within = [(body, {name for each in body.node for name in each.output}) for body in bodies]
    return {name for name in node.input if name} | {
        name
        for body, made in within
        for each in (*(read_by(each) for each in body.node), {value.name for value in body.output})
        for name in each - made - {value.name for value in (*body.input, *body.initializer)}
    }


def attributes(node: NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def replace_entries(*fields: tuple[Any, Sequence[Any]]) -> None:
    """Replace the entries of repeated fields of a graph, given as (field, new entries).

    All new entries are copied before a field is emptied, so they may come from the same fields.
    """
    for field, entries in fields:
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
        del field[:]
        field.extend(copies)


class ConstantInts:
    """Store of integer constants of a graph: each is added once, with a name that begins with ``prefix``.

    A call returns the name.
    """

    def __init__(self, graph: GraphProto, prefix: str) -> None:
        self._graph, self._prefix = graph, prefix
        self._names: dict[Shape, str] = {}

    def __call__(self, numbers: Sequence[int]) -> str:
        key = tuple(numbers)
        if key not in self._names:
            self._names[key] = name = f"{self._prefix}{len(self._names)}"
            self._graph.initializer.append(numpy_helper.from_array(np.array(key, np.int64), name))
        return self._names[key]


def live_peak(values: GraphValues) -> int:
    """Return the largest number of entries that values hold while a node runs, without inputs and constants of the graph.

    Views hold none of their own. Values of unknown size count as none, because they are small. Use it to compare two forms
    of one graph.
    """
    nodes, root = values.graph.node, dict[str, str]()
    for node in nodes:
        if node.op_type in VIEWS and not node.domain:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
    last = {root.get(name, name): place for place, node in enumerate(nodes) for name in read_by(node)}
    held, now, most = dict.fromkeys((*values.inputs, *values.constants), 0), 0, 0
    for place, node in enumerate(nodes):
        for name in node.output:
            if name not in root:
                held[name] = values.count(name)
                now += held[name]
        most = max(most, now)
        for name in {root.get(name, name) for name in (*read_by(node), *node.output)}:
            if last.get(name, place) <= place:
                now -= held.pop(name, 0)
    return most
