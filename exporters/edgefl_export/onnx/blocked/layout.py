"""Values of a graph in two layouts, and the writer of its new nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgefl_export.onnx.values import LAYOUT, ConstantInts, GraphValues, Shape, read_by

BLOCK = 16
"""The largest block of any processor, which the others divide: channels come in multiples of it."""
ROOM = 1.1
"""What values may need at a time, as a multiple of what they need in the graph's own form: devices reserve as much more."""
AXES = 4
_CHANNELS = 1


class BlockedLayout:
    """Writer of a graph with values on the blocked layout (channels in blocks of a register's size).

    A value may have a twin on the layout, in addition, or as a replacement if it was computed there. The twin is
    converted back before the first node off the layout that reads it.

    Attributes:
        nodes: nodes written so far, in order.
        values: values of the original graph.
        shapes: shapes of all values by name.
        done: results of nodes that other nodes have absorbed.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes: list[NodeProto] = []
        self.values = GraphValues(graph)
        self.shapes = self.values.shapes
        self.done: set[str] = set()
        self._graph = graph
        self._size = ConstantInts(graph, "blocked_size")
        self._numbers: dict[tuple[float, Shape], str] = {}
        self._twins: dict[str, str] = {}
        self._inside: dict[str, str] = {}

    def is_image(self, name: str) -> bool:
        """Return True if a value can be on the blocked layout (NCHWc): float32 [N, C, H, W] with a multiple of
        :data:`BLOCK` channels.
        """
        shape = self.shapes.get(name, ())
        known = len(shape) == AXES and self.values.types.get(name) == TensorProto.FLOAT
        return known and shape[_CHANNELS] % BLOCK == 0

    def is_inside(self, name: str) -> bool:
        """Return True if a value was computed on the blocked layout (NCHWc)."""
        return name in self._inside

    def twin(self, name: str) -> str:
        """Return the name of the copy of value ``name`` on the blocked layout (NCHWc); write the conversion if there
        is no copy yet.
        """
        if name not in self._twins:
            self._twins[name] = self.call("ReorderInput", [name])
            self.shapes[self._twins[name]] = self.shapes.get(name, ())
        return self._twins[name]

    def keep(self, name: str, twin: str, shape: Shape) -> None:
        """Register ``twin``, a value on the blocked layout (NCHWc) with ``shape``, as the value ``name`` of the
        original graph.
        """
        self._twins[name] = self._inside[name] = twin
        self.shapes[name] = self.shapes[twin] = shape

    def sole_reader(self, name: str) -> NodeProto | None:
        """Return the only reader of a value, or None if it has several or is an output of the graph."""
        found = self.values.read_at(name)
        return found[0] if len(found) == 1 and name not in self.values.outputs else None

    def activated(self, result: str) -> tuple[str, dict[str, str]]:
        """Return (name of the result, attributes) for a convolution with the result ``result``.

        If only a ReLU reads it, the convolution computes that too: the name is then the ReLU's result.
        """
        reader = self.sole_reader(result)
        if reader is None or reader.op_type != "Relu" or reader.domain:
            return result, {}
        self.done.add(reader.output[0])
        return reader.output[0], {"activation": "Relu"}

    def waits(self, node: NodeProto) -> bool:
        """Return True if ``node`` is a Reshape to the same shape, which only delays its operand."""
        sizes = self.values.waiting(node)
        return sizes is not None and sizes == self.shapes.get(node.input[0])

    def call(self, op: str, inputs: Sequence[str], domain: str = LAYOUT, **options: Any) -> str:
        """Append a node of op ``op`` and return the name of its result.

        ``options`` are its attributes; by default it is an op of the blocked layout (NCHWc).
        """
        result = f"blocked{len(self.nodes)}"
        self.emit(op, inputs, result, domain, **options)
        return result

    def emit(self, op: str, inputs: Sequence[str], result: str, domain: str = LAYOUT, **options: Any) -> None:
        name = f"{op}_b{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [result], name=name, domain=domain, **options))

    def reshaped(self, value: str, shape: Shape) -> str:
        return self.call("Reshape", [value, self.sizes(shape)], domain="")

    def sizes(self, numbers: Shape) -> str:
        """Return the name of a constant of these integers."""
        return self._size(numbers)

    def filled(self, number: float, *shape: int) -> str:
        """Return the name of a constant of ``shape`` whose entries all equal ``number``."""
        key = (number, shape)
        if key not in self._numbers:
            array = np.full(shape, number, np.float32)
            self._numbers[key] = self._constant(array, f"number{len(self._numbers)}")
        return self._numbers[key]

    def finished(self, outputs: set[str]) -> list[NodeProto]:
        """Return the written nodes without unread ones.

        Values on the blocked layout (NCHWc) are converted back for all other nodes that read them.

        ``outputs`` are the names of the graph's outputs.
        """
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
