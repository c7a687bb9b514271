"""Chains written as loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import NodeProto, ValueInfoProto, helper

from exporters.onnx.tiled.chains import Chain
from exporters.onnx.values import Shape, Sizes, Values


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
