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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from edgefl.wire.bundle.graphs import rows_of_port
from edgefl_export.artifact import REWRITTEN
from edgefl_export.onnx.values import (
    BY_ENTRY,
    LAYOUT,
    VIEWS,
    ConstantInts,
    GraphValues,
    Shape,
    attributes,
    live_peak,
    read_by,
    replace_entries,
)

BLOCK_BYTES = 1 << 19
"""Of a tensor at a time: three of them fit into a processor's own cache of 2 MB. CNN's step on one thread takes 50.7 ms,
51.8 with blocks of 0.75 MB and 54.0 with 1 MB, and as long on two with any of them (by turns, Intel Xeon)."""
LARGE_BYTES = 1 << 21
"""From here on tensors are divided."""

_STATE = "state."


def by_rows(model: bytes) -> bytes | None:
    """Return the ONNX model with the updates of its large state in blocks of rows, or None if it has no such state."""
    proto = onnx.load_from_string(model)
    graph = _RowGraph(proto.graph)
    updates = [update for shape in graph.large_shapes() for update in graph.updates_of(shape)]
    if not updates:
        return None
    _RowWriter(graph).write(updates)
    return bytes(proto.SerializeToString(deterministic=True))


class _RowUpdate:
    """Update of state of one shape: element-wise nodes in order, and the matrix products that only these nodes read."""

    def __init__(self, shape: Shape, nodes: list[NodeProto], products: dict[str, NodeProto]) -> None:
        self.shape, self.nodes, self.products = shape, nodes, products
        self.made = {name for node in nodes for name in node.output}


class _RowGraph(GraphValues):
    """Values and input ports of a graph, with a search for updates of large state."""

    def __init__(self, proto: Any) -> None:
        super().__init__(proto)
        self.ports: dict[str, ValueInfoProto] = {value.name: value for value in proto.input}

    def large_shapes(self) -> list[Shape]:
        """Return the shapes of large state (four bytes an entry) that the graph reads and returns."""
        names = [name.removesuffix(REWRITTEN) for name in self.outputs if name.startswith(_STATE)]
        shapes = {self.shapes[name] for name in names if name in self.ports}
        return sorted(shape for shape in shapes if 4 * math.prod(shape) >= LARGE_BYTES and shape[0] > 1)

    def updates_of(self, shape: Shape) -> list[_RowUpdate]:
        """Return the updates of state of ``shape`` whose gradient is a matrix product.

        Other gradients are computed whole, so that going through them row by row gains nothing.
        """
        chosen = self._for_new_state(shape)
        parts = [
            _RowUpdate(shape, nodes, self._products_for(nodes, shape)) for nodes in _group_connected(chosen)
        ]
        return [part for part in parts if part.products and self._reads_state(part.nodes, shape)]

    def _for_new_state(self, shape: Shape) -> list[NodeProto]:
        """Return the element-wise nodes whose results only new state of ``shape`` depends on, in order."""
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
        """Return the matrix products of ``shape`` that only ``nodes`` read, by name of the result."""
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
    """Writer of updates in blocks of rows, at the end of a graph."""

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
        replace_entries(
            (self._proto.input, [*inputs, *self._inputs.values()]),
            (self._proto.output, outputs),
            (self._proto.value_info, [*info, *self._products]),
            (self._proto.node, [*kept, *self._nodes]),
        )

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
        """Return the name of rows ``start`` to ``stop`` of a value that an update reads; write the nodes that compute them.

        Return ``name`` itself if the value is broadcast along rows.
        """
        if name in names:
            return names[name]
        shape = self._graph.shapes.get(name, ())
        if len(shape) < len(update.shape) or shape[0] == 1:
            return name
        if name in self._graph.ports and shape == update.shape and name.startswith(_STATE):
            return self._port(name, start, stop)
        if name in update.products:
            product = update.products[name]
            left = self._slice(product.input[0], start, stop)
            made = names[name] = f"{name}_{start}"
            size = [stop - start, *shape[1:]]
            self._products.append(helper.make_tensor_value_info(made, self._graph.types[name], size))
            node = helper.make_node(
                "MatMul", [left, product.input[1]], [made], name=f"{product.name}_{start}"
            )
            self._nodes.append(node)
            return made
        names[name] = self._slice(name, start, stop)
        return names[name]

    def _port(self, name: str, start: int, stop: int) -> str:
        part = rows_of_port(name, start, stop)
        if part not in self._inputs:
            shape = [stop - start, *self._graph.shapes[name][1:]]
            self._inputs[part] = helper.make_tensor_value_info(part, self._graph.types[name], shape)
        return part

    def _slice(self, name: str, start: int, stop: int) -> str:
        made = f"{name}_rows{start}_{len(self._nodes)}"
        bounds = [self._number(start), self._number(stop), self._number(0)]
        self._nodes.append(helper.make_node("Slice", [name, *bounds], [made], name=f"Slice_{made}"))
        return made

    def _number(self, value: int) -> str:
        if (value,) not in self._numbers:
            self._numbers[(value,)] = name = f"rows_number{value}"
            self._proto.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
        return self._numbers[(value,)]


def _group_connected(nodes: Sequence[NodeProto]) -> list[list[NodeProto]]:
    """Return ``nodes`` in groups that are connected by reading each other's results; each group in order."""
    groups: list[list[NodeProto]] = []
    for node in nodes:
        mine = [each for each in groups if any(made in node.input for other in each for made in other.output)]
        groups = [each for each in groups if each not in mine] + [[n for each in mine for n in each] + [node]]
    return groups


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
    return ((start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))


# Chains of ops by rows, a few rows at a time: values within a chain stay in a cache.
#
# Op by op, each value of a chain goes to memory and comes back. The first axis is the batch or its tokens. If
# every op computes a row from the same rows of its operands, a loop runs the whole chain for some rows before the next::
#
#     a = f(x); b = g(a, y); c = h(b)      [32, 64, 1024]
#     -> Scan over [16, 2, 64, 1024] of x and y: c[i] = h(g(f(x[i]), y[i]))
#
# ``Scan`` hands its body views of its inputs, and lets it write into its outputs, so nothing is copied. The same ops make
# the same numbers. On several threads each op of the loop has less to share among them, so that a device decides by trying.

# Chains of ops by rows, and how many rows a loop takes at a time.

# Which ops make every row, a place of the first axis, of the same rows of what they read.

Rule = Callable[[GraphValues, NodeProto], tuple[str, ...]]


def rows_read(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    """Return the inputs of ``node`` that are read row by row: row i of the result depends on row i of each.

    The other inputs are the same for all rows. Return () for another kind of op, or if sizes are unknown.
    """
    if len(node.output) != 1 or node.output[0] not in values.shapes:
        return ()
    rule = _RULES.get((node.domain, node.op_type))
    read = rule(values, node) if rule else ()
    known = all(name in values.shapes and values.types.get(name, 0) for name in (*read, *node.output))
    return read if known else ()


def _entries(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    shape = values.shapes[node.output[0]]
    names = [name for name in node.input if name]
    if any(name not in values.shapes for name in names):
        return ()
    shapes = [(name, values.shapes[name]) for name in names]
    return tuple(name for name, each in shapes if len(each) == len(shape) and each[:1] == shape[:1] != (1,))


def _along_axis(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    axis = int(attributes(node).get("axis", -1))
    return (node.input[0],) if axis % len(values.shapes[node.output[0]]) else ()


def _reduced(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    axes = values.whole(node.input[1]) if len(node.input) > 1 else None
    rank = len(values.shapes[node.output[0]])
    kept = attributes(node).get("keepdims", 1)
    return (node.input[0],) if kept and axes and all(axis % rank for axis in axes) else ()


def _view(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    """Return (input,) of a reshape to constant sizes, else ().

    Equal numbers of first rows hold the same entries in both.
    """
    return () if values.whole(node.input[1]) is None else (node.input[0],)


def _pooled(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    return (node.input[0],)


def _scaled(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    """Return (input,) of a convolution that only scales each channel, and may add a number to each, else ()."""
    kernel = values.shapes.get(node.input[1], (0, 0))
    return (node.input[0],) if math.prod(kernel[1:]) == 1 else ()


_RULES: Mapping[tuple[str, str], Rule] = {
    **{("", op): _entries for op in BY_ENTRY},
    **{("", op): _along_axis for op in ("Softmax", "LogSoftmax")},
    **{("", op): _reduced for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")},
    ("", "Reshape"): _view,
    (LAYOUT, "GlobalAveragePool"): _pooled,
    (LAYOUT, "Conv"): _scaled,
}


TILE_BYTES = 1 << 18
"""Of the largest value of a chain at a time: a handful of them fit into the cache of one core."""
MEMORY_BYTES = 1 << 20
"""From here on a value goes through memory."""
_OPS = 2
"""Of a chain at least, views apart."""
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class NodeChain:
    """Chain of nodes that read and write rows independently, so that one loop over blocks of rows replaces them.

    Attributes:
        places: positions of all its nodes; the loop takes the position of the last one.
        body: positions of the nodes in the loop.
        inputs: values that the loop reads some rows at a time.
        outputs: values of the loop that are read elsewhere.
        turns: number of iterations.
        views: views that are read elsewhere, each with the output that it shows.
    """

    places: tuple[int, ...]
    body: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    turns: int
    views: tuple[tuple[str, str], ...]


def chains(values: GraphValues) -> list[NodeChain]:
    """Return all chains of nodes that are worth a loop, in order."""
    rows = _rows(values)
    found = [_chain(values, members, rows) for members in _grow_groups(values, rows)]
    return [chain for chain in found if chain is not None]


def _rows(values: GraphValues) -> dict[int, tuple[str, ...]]:
    """Return for each node that may be part of a chain, by its position, the inputs that it reads row by row."""
    rows = dict[int, tuple[str, ...]]()
    for place, node in enumerate(values.graph.node):
        read = rows_read(values, node)
        named = (*read, *node.output)
        ported = not values.outputs.isdisjoint(node.output)  # may be written where it is read
        divides = read and not ported and _divisor(values, named) > 1
        if divides and max(map(values.count, named)) * _NUMBER_BYTES >= MEMORY_BYTES:
            rows[place] = read
    return rows


def _grow_groups(values: GraphValues, rows: Mapping[int, Sequence[str]]) -> list[list[int]]:
    """Return groups of positions of nodes that can run together at the position of their last node.

    Each node joins the nodes that compute its operands, unless another node needs one of their results earlier.
    """
    group = dict[int, list[int]]()
    for place, read in rows.items():
        mine = [place]
        for name in read:
            others = group.get(values.places.get(name, -1), [])
            joined = sorted({*mine, *others})
            if len(joined) > len(mine) and _fits(values, rows, joined):
                mine = joined
        group |= dict.fromkeys(mine, mine)
    return [members for place, members in group.items() if members[0] == place]


def _fits(values: GraphValues, rows: Mapping[int, Sequence[str]], places: Sequence[int]) -> bool:
    """Return True if the nodes at ``places`` can run at the position of the last of them, some rows at a time."""
    own, last = {*places}, places[-1]
    results = [values.graph.node[place].output[0] for place in places]
    if _divisor(values, (*results, *(name for place in places for name in rows[place]))) == 1:
        return False
    taken = {*results, *(name for place in places for name in rows[place])}
    if any((read_by(values.graph.node[place]) - {*rows[place]}) & taken for place in places):
        return False  # one of them reads all of it for each row
    readers = (reader for name in results for reader in values.readers.get(name, ()))
    return all(reader in own or reader > last for reader in readers)


def _divisor(values: GraphValues, names: Iterable[str]) -> int:
    """Return the largest number of equal parts into which the first axes of all these values can be cut."""
    return math.gcd(*(values.shapes[name][0] if values.shapes[name] else 1 for name in names))


def _chain(values: GraphValues, places: Sequence[int], rows: Mapping[int, Sequence[str]]) -> NodeChain | None:
    """Return the chain of the nodes at ``places``, or None if the loop would avoid no large value in memory."""
    own, nodes = {*places}, values.graph.node
    result = {place: nodes[place].output[0] for place in places}
    read = [name for name in result.values() if not own.issuperset(values.readers.get(name, ()))]
    viewed = [(name, _resolve_view(values, name, own)) for name in read]
    outputs = dict.fromkeys(origin for _, origin in viewed if values.places.get(origin, -1) in own)
    needed = {*outputs}
    for place in reversed(places):
        if result[place] in needed:
            needed |= read_by(nodes[place])
    kept = [place for place in places if result[place] in needed]
    inputs = dict.fromkeys(
        name for place in kept for name in rows[place] if values.places.get(name, -1) not in own
    )
    ops = [result[place] for place in kept if nodes[place].op_type not in VIEWS]
    between = max((values.count(name) for name in ops if name not in outputs), default=0)
    if len(ops) < _OPS or between * _NUMBER_BYTES < MEMORY_BYTES // 2:
        return None
    made = [result[place] for place in kept]
    turns = _turns(_divisor(values, (*inputs, *made)), max(map(values.count, (*inputs, *made))))
    views = tuple((name, origin) for name, origin in viewed if name != origin)
    return NodeChain(tuple(places), tuple(kept), tuple(inputs), tuple(outputs), turns, views)


def _resolve_view(values: GraphValues, name: str, own: set[int]) -> str:
    """Return the value whose entries ``name`` has, after following views back.

    ``own`` has the positions of the nodes of a chain; only views among them are followed.
    """
    while (place := values.places.get(name, -1)) in own and values.graph.node[place].op_type in VIEWS:
        name = values.graph.node[place].input[0]
    return name


def _turns(divisor: int, count: int) -> int:
    """Return the number of parts, a divisor of ``divisor``, into which a value of ``count`` numbers is best cut.

    A part then has about the size of a tile, :data:`TILE_BYTES` bytes. A loop over the parts has this many iterations.
    """
    wanted = count * _NUMBER_BYTES / TILE_BYTES
    parts = [part for part in range(2, divisor + 1) if divisor % part == 0]
    return min(parts, key=lambda part: abs(math.log(part / wanted)))


# Chains written as loops.


def write(values: GraphValues, chains: Sequence[NodeChain]) -> None:
    """Replace each chain in the graph by a loop at the position of its last node."""
    sizes = ConstantInts(values.graph, "tile_size")
    gone = {place for chain in chains for place in chain.places}
    loops = {chain.places[-1]: chain for chain in chains}
    nodes = list[NodeProto]()
    for place, node in enumerate(values.graph.node):
        if place not in gone:
            nodes.append(node)
        if place in loops:
            nodes += _loop(values, loops[place], sizes, f"tile{place}")
    replace_entries((values.graph.node, nodes))


def _loop(values: GraphValues, chain: NodeChain, sizes: ConstantInts, name: str) -> Iterator[NodeProto]:
    """Yield the nodes of a loop: views of its inputs by tiles, the Scan, and its outputs in their own shapes."""

    def tile(value: str) -> Shape:
        first, *rest = values.shapes[value]
        return (first // chain.turns, *rest)

    def ports(names: dict[str, str]) -> list[ValueInfoProto]:
        return [
            helper.make_tensor_value_info(mine, values.types[value], tile(value))
            for value, mine in names.items()
        ]

    taken = {value: f"{name}_{index}" for index, value in enumerate(chain.inputs)}
    for value, mine in taken.items():
        yield helper.make_node("Reshape", [value, sizes((chain.turns, *tile(value)))], [f"{mine}_all"])
    inside = dict(taken)
    body = list[NodeProto]()
    for place in chain.body:
        node = NodeProto.FromString(values.graph.node[place].SerializeToString())
        node.input[:] = [inside.get(each, each) for each in node.input]
        if node.op_type == "Reshape":
            node.input[1] = sizes(tile(node.output[0]))
        inside |= {each: f"{name}_{each}" for each in node.output}
        node.output[:] = [inside[each] for each in node.output]
        body.append(node)
    given = {value: inside[value] for value in chain.outputs}
    yield helper.make_node(
        "Scan",
        [f"{mine}_all" for mine in taken.values()],
        [f"{mine}_all" for mine in given.values()],
        name=f"Scan_{name}",
        num_scan_inputs=len(taken),
        body=helper.make_graph(body, name, ports(taken), ports(given)),
    )
    for value, mine in given.items():
        yield helper.make_node("Reshape", [f"{mine}_all", sizes(values.shapes[value])], [value])
    for value, origin in chain.views:
        yield helper.make_node("Reshape", [origin, sizes(values.shapes[value])], [value])


__all__ = ["write_loops"]

ROOM = 1.02
"""What values may need at a time, as a multiple of what they needed."""


def write_loops(model: bytes) -> bytes | None:
    """Return the ONNX model with its large chains of row by row nodes in loops.

    Return None if it has no chain, or if its values would need much more memory: in a chain an op may run later than
    alone.
    """
    proto = onnx.load_from_string(model)
    values = GraphValues(proto.graph)
    found, most = chains(values), ROOM * live_peak(values)
    if not found:
        return None
    write(values, found)
    if live_peak(GraphValues(proto.graph)) > most:
        return None
    return bytes(proto.SerializeToString(deterministic=True))
