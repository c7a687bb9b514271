"""The values of a graph in two layouts, and the nodes that are written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporters.onnx.values import LAYOUT, Shape, read_by

BLOCK = 16
"""The largest block of any processor, which the others divide: channels come in multiples of it."""
AXES = 4
_CHANNELS = 1


class Layout:
    """Writes nodes anew. ``nodes``: so far, in order. ``done``: results of nodes that others have taken in.

    A value may have a twin on the blocked layout: beside it or, of what was made there, in its place. That one comes out of
    the layout before the first node that reads it elsewhere, if any does.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes: list[NodeProto] = []
        values = (*graph.value_info, *graph.input, *graph.output)
        self.shapes: dict[str, Shape] = {
            each.name: tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
            for each in values
            if each.type.tensor_type.HasField("shape")
        }
        self._others = {each.name for each in values if each.type.tensor_type.elem_type != TensorProto.FLOAT}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in read_by(node):
                self._readers.setdefault(name, []).append(node)
        self._outputs = {each.name for each in graph.output}
        self._graph = graph
        self._constants = {each.name: each for each in graph.initializer}
        self.shapes |= {name: tuple(each.dims) for name, each in self._constants.items()}
        self.done: set[str] = set()
        self._sizes: dict[Shape, str] = {}
        self._numbers: dict[tuple[float, Shape], str] = {}
        self._twins: dict[str, str] = {}
        self._inside: dict[str, str] = {}
        for node in graph.node:  # shapes that wait for something are unknown to ONNX
            sizes = self._waiting(node)
            if sizes is not None:
                self.shapes[node.output[0]] = sizes

    def is_image(self, name: str) -> bool:
        """Whether it has a place in the layout: numbers [N, C, H, W], with channels in whole blocks."""
        shape = self.shapes.get(name, ())
        known = len(shape) == AXES and all(size > 0 for size in shape)
        return known and shape[_CHANNELS] % BLOCK == 0 and name not in self._others

    def is_inside(self, name: str) -> bool:
        """Whether it was made on the blocked layout."""
        return name in self._inside

    def twin(self, name: str) -> str:
        """The value on the blocked layout, brought there where it is not yet."""
        if name not in self._twins:
            self._twins[name] = self.call("ReorderInput", [name])
            self.shapes[self._twins[name]] = self.shapes.get(name, ())
        return self._twins[name]

    def keep(self, name: str, twin: str, shape: Shape) -> None:
        """``twin`` was made there in place of ``name``."""
        self._twins[name] = self._inside[name] = twin
        self.shapes[name] = self.shapes[twin] = shape

    def readers(self, name: str) -> Sequence[NodeProto]:
        return self._readers.get(name, ())

    def sole_reader(self, name: str) -> NodeProto | None:
        """The only node that reads it, of what is no result of the graph."""
        found = self.readers(name)
        return found[0] if len(found) == 1 and name not in self._outputs else None

    def maker(self, name: str, op: str) -> NodeProto | None:
        """The node that made it, if it is one of that kind."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == op and not node.domain else None

    def whole(self, name: str) -> Shape | None:
        """The whole numbers of a constant; None for what is none."""
        constant = self._constants.get(name)
        if constant is None or constant.data_type != TensorProto.INT64:
            return None
        return tuple(int(each) for each in np.ravel(numpy_helper.to_array(constant)))

    def activated(self, result: str) -> tuple[str, dict[str, str]]:
        """What a convolution gives in place of ``result``, where a ReLU alone reads that, and its options."""
        reader = self.sole_reader(result)
        if reader is None or reader.op_type != "Relu" or reader.domain:
            return result, {}
        self.done.add(reader.output[0])
        return reader.output[0], {"activation": "Relu"}

    def waits(self, node: NodeProto) -> bool:
        """Whether it is reshaped to its own shape, as :func:`exporters.onnx.ops.after` does."""
        sizes = self._waiting(node)
        return sizes is not None and sizes == self.shapes.get(node.input[0])

    def _waiting(self, node: NodeProto) -> Shape | None:
        """The shape of what waits for something else, in its own shape or in that of a view behind it; else None."""
        sizes = self.maker(node.input[1], "Add") if node.op_type == "Reshape" else None
        nothing = self.maker(sizes.input[1], "Mul") if sizes else None
        cast = self.maker(nothing.input[0], "Cast") if nothing else None
        if sizes is None or nothing is None or cast is None or self.maker(cast.input[0], "IsNaN") is None:
            return None
        return self.whole(sizes.input[0]) if self.whole(nothing.input[1]) == (0,) else None

    def is_waited_for(self, node: NodeProto) -> bool:
        """Whether nothing but its first number is read."""
        return node.output[0] not in self._outputs and all(
            each.op_type == "Slice" and list(map(self.whole, each.input[1:])) == [(0,), (1,)]
            for each in self.readers(node.output[0])
        )

    def call(self, op: str, inputs: Sequence[str], domain: str = LAYOUT, **options: Any) -> str:
        """The result of one more node."""
        result = f"blocked{len(self.nodes)}"
        self.emit(op, inputs, result, domain, **options)
        return result

    def emit(self, op: str, inputs: Sequence[str], result: str, domain: str = LAYOUT, **options: Any) -> None:
        name = f"{op}_b{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [result], name=name, domain=domain, **options))

    def reshaped(self, value: str, shape: Shape) -> str:
        return self.call("Reshape", [value, self.sizes(shape)], domain="")

    def sizes(self, numbers: Shape) -> str:
        """The name of a constant of whole numbers."""
        if numbers not in self._sizes:
            self._sizes[numbers] = self._constant(np.array(numbers, np.int64), f"size{len(self._sizes)}")
        return self._sizes[numbers]

    def filled(self, number: float, *shape: int) -> str:
        """The name of a constant that has one number everywhere."""
        key = (number, shape)
        if key not in self._numbers:
            array = np.full(shape, number, np.float32)
            self._numbers[key] = self._constant(array, f"number{len(self._numbers)}")
        return self._numbers[key]

    def finished(self, outputs: set[str]) -> list[NodeProto]:
        """The nodes, without those that made something for what is written anew, and with those that bring out of the
        layout what is read elsewhere."""
        read, kept = set(outputs), list[NodeProto]()
        for name in outputs & self._inside.keys():
            read.add(self._inside[name])
        for node in reversed(self.nodes):
            if any(name in read for name in node.output):
                names = read_by(node)
                read.update(names, (self._inside[name] for name in names & self._inside.keys()))
                kept.append(node)
        return list(self._brought_out(kept[::-1], outputs))

    def _brought_out(self, nodes: Sequence[NodeProto], outputs: set[str]) -> Iterator[NodeProto]:
        inside = dict(self._inside)
        for node in nodes:
            yield from (self._out(name, inside.pop(name)) for name in sorted(read_by(node) & inside.keys()))
            yield node
        yield from (self._out(name, inside.pop(name)) for name in sorted(outputs & inside.keys()))

    def _out(self, name: str, twin: str) -> NodeProto:
        channels = self.shapes[name][_CHANNELS]
        return helper.make_node(
            "ReorderOutput", [twin], [name], name=f"out_{twin}", domain=LAYOUT, channels=channels
        )

    def _constant(self, array: Any, name: str) -> str:
        self._graph.initializer.append(numpy_helper.from_array(array, f"blocked_{name}"))
        return f"blocked_{name}"
