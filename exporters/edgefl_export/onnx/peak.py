"""How much a graph's values need at a time, in the order of its nodes: to compare two forms of one graph."""

from __future__ import annotations

from edgefl_export.onnx.values import VIEWS, Values, read_by


def live_peak(values: Values) -> int:
    """The most numbers that values hold while a node runs, inputs and constants of the graph apart; views take none of their
    own, nor does what has no known size, which is small."""
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
