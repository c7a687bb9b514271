"""Chains of ops by rows, a few rows at a time: what stands between the first and the last stays in a cache.

Op by op, each value of a chain goes to memory and comes back. Where the first axis is the batch, or the tokens of one, and
every op makes a row of the same row of what it reads, a loop goes through the whole chain with some rows before it takes the
next ones::

    a = f(x); b = g(a, y); c = h(b)      [32, 64, 1024]
    -> Scan over [16, 2, 64, 1024] of x and y: c[i] = h(g(f(x[i]), y[i]))

``Scan`` hands its body views of its inputs, and lets it write into its outputs, so nothing is copied. The same ops make the
same numbers. On several threads each op of the loop has less to share among them, so that a device decides by trying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import NodeProto, ValueInfoProto, helper

from exporters.onnx.peak import live_peak
from exporters.onnx.tiled.chains import Chain, chains
from exporters.onnx.values import Shape, Sizes, Values

# Chains written as loops.


def write(values: Values, chains: Sequence[Chain]) -> None:
    """Put the loop of each chain where its last node stood."""
    sizes = Sizes(values.graph, "tile_size")
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


def _loop(values: Values, chain: Chain, sizes: Sizes, name: str) -> Iterator[NodeProto]:
    """Views of the inputs by tiles, the loop, and its outputs in their own shapes."""

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
    """The ONNX model with its large chains in loops; None where it has none, or its values need more than a little more
    then: an op may run later in a chain than it did alone."""
    proto = onnx.load_from_string(model)
    values = Values(proto.graph)
    found, most = chains(values), ROOM * live_peak(values)
    if not found:
        return None
    write(values, found)
    if live_peak(Values(proto.graph)) > most:
        return None
    return bytes(proto.SerializeToString(deterministic=True))
