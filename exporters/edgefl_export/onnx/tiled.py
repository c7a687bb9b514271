"""Chains of ops by rows, a few rows at a time: values within a chain stay in a cache.

Op by op, each value of a chain goes to memory and comes back. The first axis is the batch or its tokens. If
every op computes a row from the same rows of its operands, a loop runs the whole chain for some rows before the next::

    a = f(x); b = g(a, y); c = h(b)      [32, 64, 1024]
    -> Scan over [16, 2, 64, 1024] of x and y: c[i] = h(g(f(x[i]), y[i]))

``Scan`` hands its body views of its inputs, and lets it write into its outputs, so nothing is copied. The same ops make the
same numbers. On several threads each op of the loop has less to share among them, so that a device decides by trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto, ValueInfoProto, helper

from edgefl_export.onnx.values import (
    BY_ENTRY,
    LAYOUT,
    VIEWS,
    ConstantSizes,
    GraphValues,
    Shape,
    attributes,
    live_peak,
    read_by,
)

# Chains of ops by rows, and how many rows a loop takes at a time.

# Which ops make every row, a place of the first axis, of the same rows of what they read.

Rule = Callable[[GraphValues, NodeProto], tuple[str, ...]]


def rows_read(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    """Return the inputs of which ``node`` reads a row for each row of its result.

    None for another kind of op, or if sizes are unknown. Its other inputs are the same for all rows.
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
    """Return True if equally many first rows of both shapes hold the same numbers."""
    return () if values.whole(node.input[1]) is None else (node.input[0],)


def _pooled(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    return (node.input[0],)


def _scaled(values: GraphValues, node: NodeProto) -> tuple[str, ...]:
    """Return True for a number, and perhaps another that is added, for each channel."""
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
LARGE_BYTES = 1 << 20
"""From here on a value goes through memory."""
_OPS = 2
"""Of a chain at least, views apart."""
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class Chain:
    """Nodes that one loop replaces.

    ``places``: positions of the nodes; the loop takes the position of the last one. ``body``: nodes in the loop. ``inputs``
    and ``outputs``: values that it takes by rows, and that are read elsewhere. ``turns``: iterations of the loop. ``views``:
    outputs that are views, with their sources.
    """

    places: tuple[int, ...]
    body: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    turns: int
    views: tuple[tuple[str, str], ...]


def chains(values: GraphValues) -> list[Chain]:
    """Return all chains that are worth a loop, in order."""
    rows = _rows(values)
    found = [_chain(values, members, rows) for members in _grown(values, rows)]
    return [chain for chain in found if chain is not None]


def _rows(values: GraphValues) -> dict[int, tuple[str, ...]]:
    """Return by place the inputs that each possible node of a chain reads by rows."""
    rows = dict[int, tuple[str, ...]]()
    for place, node in enumerate(values.graph.node):
        read = rows_read(values, node)
        named = (*read, *node.output)
        ported = not values.outputs.isdisjoint(node.output)  # may be written where it is read
        divides = read and not ported and _divisor(values, named) > 1
        if divides and max(map(values.count, named)) * _NUMBER_BYTES >= LARGE_BYTES:
            rows[place] = read
    return rows


def _grown(values: GraphValues, rows: Mapping[int, Sequence[str]]) -> list[list[int]]:
    """Return the places in groups that can run at the position of their last node.

    Each node joins the makers of its operands, unless another node needs one of their results before.
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
    """Return True if these nodes can run at the position of the last of them, some rows at a time."""
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
    """Return the largest number of parts into which the first axes of all of them divide."""
    return math.gcd(*(values.shapes[name][0] if values.shapes[name] else 1 for name in names))


def _chain(values: GraphValues, places: Sequence[int], rows: Mapping[int, Sequence[str]]) -> Chain | None:
    """Return the chain of these nodes; None if no value of it would be kept from memory."""
    own, nodes = {*places}, values.graph.node
    result = {place: nodes[place].output[0] for place in places}
    read = [name for name in result.values() if not own.issuperset(values.readers.get(name, ()))]
    viewed = [(name, _seen(values, name, own)) for name in read]
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
    if len(ops) < _OPS or between * _NUMBER_BYTES < LARGE_BYTES // 2:
        return None
    made = [result[place] for place in kept]
    turns = _turns(_divisor(values, (*inputs, *made)), max(map(values.count, (*inputs, *made))))
    views = tuple((name, origin) for name, origin in viewed if name != origin)
    return Chain(tuple(places), tuple(kept), tuple(inputs), tuple(outputs), turns, views)


def _seen(values: GraphValues, name: str, own: set[int]) -> str:
    """Return the source of a view within the chain."""
    while (place := values.places.get(name, -1)) in own and values.graph.node[place].op_type in VIEWS:
        name = values.graph.node[place].input[0]
    return name


def _turns(divisor: int, count: int) -> int:
    """Return the number of turns that brings the largest value, of ``count`` numbers, nearest to a tile."""
    wanted = count * _NUMBER_BYTES / TILE_BYTES
    parts = [part for part in range(2, divisor + 1) if divisor % part == 0]
    return min(parts, key=lambda part: abs(math.log(part / wanted)))


# Chains written as loops.


def write(values: GraphValues, chains: Sequence[Chain]) -> None:
    """Put the loop of each chain at the position of its last node."""
    sizes = ConstantSizes(values.graph, "tile_size")
    gone = {place for chain in chains for place in chain.places}
    loops = {chain.places[-1]: chain for chain in chains}
    nodes = list[NodeProto]()
    for place, node in enumerate(values.graph.node):
        if place not in gone:
            nodes.append(NodeProto.FromString(node.SerializeToString()))
        if place in loops:
            nodes += _loop(values, loops[place], sizes, f"tile{place}")
    del values.graph.node[:]
    values.graph.node.extend(nodes)


def _loop(values: GraphValues, chain: Chain, sizes: ConstantSizes, name: str) -> Iterator[NodeProto]:
    """Write the views of the inputs by tiles, the loop, and its outputs in their own shapes."""

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


__all__ = ["tiled"]

ROOM = 1.02
"""What values may need at a time, as a multiple of what they needed."""


def tiled(model: bytes) -> bytes | None:
    """Return the ONNX model with its large chains in loops, or None.

    None if it has no chain, or if its values would need much more memory: in a chain an op may run later than alone.
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
