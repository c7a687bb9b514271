"""Updates of large tensors row by row: values between the old and the new state stay in a cache.

As one graph writes it, each op of ``m <- mu m + g + d w; w <- w - lr m`` goes through memory: eleven times for a weight that
no cache holds. Here a block of rows goes through all of them, its gradient's product included, before the next begins::

    w[0:32], m[0:32], g[0:32] @ x   ->  w.next[0:32], m.next[0:32]
    w[32:64], ...                   ->  w.next[32:64], ...

The blocks are ports of the model, named by their rows (:mod:`edgefl.wire.bundle.graphs`): a runtime binds them to places in
the memory of the whole tensor, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from edgefl.wire.bundle.graphs import rows_of_port
from edgefl_export.artifact import REWRITTEN
from edgefl_export.onnx.values import BY_ENTRY, GraphValues, Shape

BLOCK_BYTES = 1 << 19
"""Of a tensor at a time: three of them fit into a processor's own cache of 2 MB. CNN's step on one thread takes 50.7 ms,
51.8 with blocks of 0.75 MB and 54.0 with 1 MB, and as long on two with any of them (by turns, Intel Xeon)."""
LARGE_BYTES = 1 << 21
"""From here on tensors are divided."""

_STATE = "state."


def by_rows(model: bytes) -> bytes | None:
    """Return the ONNX model with the updates of its large state in blocks of rows; None if it has none."""
    proto = onnx.load_from_string(model)
    graph = _RowGraph(proto.graph)
    updates = [update for shape in graph.large_shapes() for update in graph.updates_of(shape)]
    if not updates:
        return None
    _RowWriter(graph).write(updates)
    return bytes(proto.SerializeToString(deterministic=True))


class _RowUpdate:
    """Nodes that make new state of one shape entry by entry, in order, and the products that only they read."""

    def __init__(self, shape: Shape, nodes: list[NodeProto], products: dict[str, NodeProto]) -> None:
        self.shape, self.nodes, self.products = shape, nodes, products
        self.made = {name for node in nodes for name in node.output}


class _RowGraph(GraphValues):
    """Values and ports of a graph."""

    def __init__(self, proto: Any) -> None:
        super().__init__(proto)
        self.ports: dict[str, ValueInfoProto] = {value.name: value for value in proto.input}

    def large_shapes(self) -> list[Shape]:
        """Return the shapes of large state of four bytes an entry that has a new value."""
        names = [name.removesuffix(REWRITTEN) for name in self.outputs if name.startswith(_STATE)]
        shapes = {self.shapes[name] for name in names if name in self.ports}
        return sorted(shape for shape in shapes if 4 * math.prod(shape) >= LARGE_BYTES and shape[0] > 1)

    def updates_of(self, shape: Shape) -> list[_RowUpdate]:
        """Return the nodes that make new state of ``shape`` and nothing else, for tensors whose gradient is a product.

        Where the gradient is made whole in another way, going through it row by row gains nothing.
        """
        chosen = self._for_new_state(shape)
        parts = [_RowUpdate(shape, nodes, self._products_for(nodes, shape)) for nodes in _connected(chosen)]
        return [part for part in parts if part.products and self._reads_state(part.nodes, shape)]

    def _for_new_state(self, shape: Shape) -> list[NodeProto]:
        """Return the nodes that work entry by entry and lead to new state of ``shape`` only, in order."""
        ends = {name for name in self.outputs if self.shapes[name] == shape and self._is_new_state(name)}
        chosen: list[NodeProto] = []
        for node in reversed(self.graph.node):
            made = node.output[0] if len(node.output) == 1 else ""
            if node.op_type not in BY_ENTRY or node.domain or self.shapes.get(made) != shape:
                continue
            readers = self.read_at(made)
            if made in self.outputs - ends or not (readers or made in ends):
                continue
            if all(any(reader is each for each in chosen) for reader in readers):
                chosen.append(node)
        return chosen[::-1]

    def _products_for(self, nodes: Sequence[NodeProto], shape: Shape) -> dict[str, NodeProto]:
        """Return the products of matrices that only ``nodes`` read, by name of the result."""
        read = {name for node in nodes for name in node.input} - self.outputs
        return {
            node.output[0]: node
            for node in self.graph.node
            if node.op_type == "MatMul"
            and node.output[0] in read
            and self.shapes.get(node.output[0]) == shape
            and len(self.shapes.get(node.input[0], ())) == len(shape) == 2
            and all(any(reader is each for each in nodes) for reader in self.read_at(node.output[0]))
        }

    def _is_new_state(self, name: str) -> bool:
        return name.startswith(_STATE) and name.removesuffix(REWRITTEN) in self.ports

    def _reads_state(self, nodes: Iterable[NodeProto], shape: Shape) -> bool:
        return any(name in self.ports and self.shapes[name] == shape for node in nodes for name in node.input)


class _RowWriter:
    """Writer of the updates of a graph, behind all else."""

    def __init__(self, graph: _RowGraph) -> None:
        self._graph, self._proto = graph, graph.graph
        self._nodes: list[NodeProto] = []
        self._numbers: dict[tuple[int, ...], str] = {}
        self._inputs: dict[str, ValueInfoProto] = {}
        self._outputs: dict[str, list[ValueInfoProto]] = {}
        self._products: list[ValueInfoProto] = []

    def write(self, updates: Sequence[_RowUpdate]) -> None:
        gone = {id(node) for update in updates for node in (*update.nodes, *update.products.values())}
        kept = [node for node in self._proto.node if id(node) not in gone]
        for update in updates:
            for start, stop in _blocks(update.shape):
                self._block(update, start, stop)
        read = {name for node in (*kept, *self._nodes) for name in node.input}
        inputs = [
            value for value in self._proto.input if value.name in read or not self._has_rows(value.name)
        ]
        outputs = [each for value in self._proto.output for each in self._outputs.get(value.name, [value])]
        values = {name for node in kept for name in node.output}
        info = [value for value in self._proto.value_info if value.name in values]
        for field, entries in (
            (self._proto.input, [*inputs, *self._inputs.values()]),
            (self._proto.output, outputs),
            (self._proto.value_info, [*info, *self._products]),
            (self._proto.node, [*kept, *self._nodes]),
        ):
            copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
            del field[:]
            field.extend(copies)

    def _has_rows(self, name: str) -> bool:
        return any(each.startswith(f"{name}[") for each in self._inputs)

    def _block(self, update: _RowUpdate, start: int, stop: int) -> None:
        """Write the update of rows ``start`` to ``stop``."""
        names: dict[str, str] = {}
        for node in update.nodes:
            inputs = [self._rows(name, update, start, stop, names) for name in node.input]
            names[node.output[0]] = made = self._made(node.output[0], update.shape, start, stop)
            copy = NodeProto.FromString(node.SerializeToString())
            copy.input[:], copy.output[:] = inputs, [made]
            copy.name = f"{node.name}_{start}"
            self._nodes.append(copy)

    def _made(self, name: str, shape: Shape, start: int, stop: int) -> str:
        if name not in self._graph.outputs:
            return f"{name}_{start}"
        part = rows_of_port(name, start, stop)
        value = helper.make_tensor_value_info(part, self._graph.types[name], [stop - start, *shape[1:]])
        self._outputs.setdefault(name, []).append(value)
        return part

    def _rows(self, name: str, update: _RowUpdate, start: int, stop: int, names: dict[str, str]) -> str:
        """Return the rows of a value that the update reads; the value itself if it has one row for all."""
        if name in names:
            return names[name]
        shape = self._graph.shapes.get(name, ())
        if len(shape) < len(update.shape) or shape[0] == 1:
            return name
        if name in self._graph.ports and shape == update.shape and name.startswith(_STATE):
            return self._port(name, start, stop)
        if name in update.products:
            product = update.products[name]
            left = self._sliced(product.input[0], start, stop)
            made = names[name] = f"{name}_{start}"
            size = [stop - start, *shape[1:]]
            self._products.append(helper.make_tensor_value_info(made, self._graph.types[name], size))
            node = helper.make_node(
                "MatMul", [left, product.input[1]], [made], name=f"{product.name}_{start}"
            )
            self._nodes.append(node)
            return made
        names[name] = self._sliced(name, start, stop)
        return names[name]

    def _port(self, name: str, start: int, stop: int) -> str:
        part = rows_of_port(name, start, stop)
        if part not in self._inputs:
            shape = [stop - start, *self._graph.shapes[name][1:]]
            self._inputs[part] = helper.make_tensor_value_info(part, self._graph.types[name], shape)
        return part

    def _sliced(self, name: str, start: int, stop: int) -> str:
        made = f"{name}_rows{start}_{len(self._nodes)}"
        bounds = [self._number(start), self._number(stop), self._number(0)]
        self._nodes.append(helper.make_node("Slice", [name, *bounds], [made], name=f"Slice_{made}"))
        return made

    def _number(self, value: int) -> str:
        if (value,) not in self._numbers:
            self._numbers[(value,)] = name = f"rows_number{value}"
            self._proto.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
        return self._numbers[(value,)]


def _connected(nodes: Sequence[NodeProto]) -> list[list[NodeProto]]:
    """Return the nodes in groups, in order: nodes of a group read results of others of it."""
    groups: list[list[NodeProto]] = []
    for node in nodes:
        mine = [each for each in groups if any(made in node.input for other in each for made in other.output)]
        groups = [each for each in groups if each not in mine] + [[n for each in mine for n in each] + [node]]
    return groups


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
    return ((start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
