"""The values of a graph in two layouts, and the nodes that are written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgefl_export.onnx.values import LAYOUT, ConstantSizes, GraphValues, Shape, read_by

BLOCK = 16
"""The largest block of any processor, which the others divide: channels come in multiples of it."""
ROOM = 1.1
"""What values may need at a time, as a multiple of what they need in the graph's own form: devices reserve as much more."""
AXES = 4
_CHANNELS = 1


class BlockedLayout:
    """Writes nodes anew. ``nodes``: so far, in order. ``done``: results of nodes that others have taken in.

    A value may have a twin on the blocked layout: beside it or, of what was made there, in its place. That one comes out of
    the layout before the first node that reads it elsewhere, if any does.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes: list[NodeProto] = []
        self.values = GraphValues(graph)
        self.shapes = self.values.shapes
        self.done: set[str] = set()
        self._graph = graph
        self._size = ConstantSizes(graph, "blocked_size")
        self._numbers: dict[tuple[float, Shape], str] = {}
        self._twins: dict[str, str] = {}
        self._inside: dict[str, str] = {}

    def is_image(self, name: str) -> bool:
        """Whether it has a place in the layout: numbers [N, C, H, W], with channels in whole blocks."""
        shape = self.shapes.get(name, ())
        known = len(shape) == AXES and self.values.types.get(name) == TensorProto.FLOAT
        return known and shape[_CHANNELS] % BLOCK == 0

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

    def sole_reader(self, name: str) -> NodeProto | None:
        """The only node that reads it, of what is no result of the graph."""
        found = self.values.read_at(name)
        return found[0] if len(found) == 1 and name not in self.values.outputs else None

    def activated(self, result: str) -> tuple[str, dict[str, str]]:
        """What a convolution gives in place of ``result``, where a ReLU alone reads that, and its options."""
        reader = self.sole_reader(result)
        if reader is None or reader.op_type != "Relu" or reader.domain:
            return result, {}
        self.done.add(reader.output[0])
        return reader.output[0], {"activation": "Relu"}

    def waits(self, node: NodeProto) -> bool:
        """Whether it is reshaped to its own shape, to wait for something."""
        sizes = self.values.waiting(node)
        return sizes is not None and sizes == self.shapes.get(node.input[0])

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
        return self._size(numbers)

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
