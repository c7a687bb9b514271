"""From a function to the graph that ExecuTorch gets: the rules for it, then what is better seen in the whole graph."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from exporters.capture.trace import Captured
from exporters.executorch.passes.finite import VARIANCE
from exporters.executorch.passes.layout import transpositions_moved
from exporters.executorch.passes.selects import selections_multiplied


def rewritten(captured: Captured) -> Captured:
    """The same graph with fewer transpositions and comparisons; ``captured`` stays as it is.

    Values count as contiguous whatever strides the trace gave them, as they are in ExecuTorch.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.module.graph, mapping := {}))
    results = tuple(mapping[node] for node in captured.module.graph.output_node().args[0])
    graph.output_node().args = (results,)
    for name, node in zip(captured.inputs, graph.find_nodes(op="placeholder"), strict=True):
        node.meta[VARIANCE] = name.endswith(".running_var")
    module = fx.GraphModule(captured.module, graph)
    selections_multiplied(module)
    transpositions_moved(module.graph)
    module.recompile()
    return replace(captured, module=module)
