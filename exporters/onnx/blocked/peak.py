"""How much a graph's values need at a time, in the order of its nodes: to compare two forms of one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnx import NodeProto

from exporters.onnx.blocked.layout import read_by

_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"}


def live_peak(nodes: Sequence[NodeProto], size: Callable[[str], int], inputs: Iterable[str]) -> int:
    """The most that values hold while a node runs, ``inputs`` of the graph apart. ``size``: of a value, by name; views take
    none of their own."""
    root: dict[str, str] = {}
    for node in nodes:
        if node.op_type in _VIEWS and not node.domain:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
    last = {root.get(name, name): place for place, node in enumerate(nodes) for name in read_by(node)}
    held, now, most = dict.fromkeys(inputs, 0), 0, 0
    for place, node in enumerate(nodes):
        for name in node.output:
            if name not in root:
                held[name] = size(name)
                now += held[name]
        most = max(most, now)
        for name in {root.get(name, name) for name in (*read_by(node), *node.output)}:
            if last.get(name, place) <= place:
                now -= held.pop(name, 0)
    return most
