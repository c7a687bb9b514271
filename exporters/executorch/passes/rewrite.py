"""From a function to the graph that ExecuTorch gets: the rules for it, then what is better seen in the whole graph."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from exporters.capture.nodes import copy_of
from exporters.capture.trace import Captured
from exporters.executorch.passes.layout import transpositions_moved
from exporters.executorch.passes.steps import step
from exporters.selections.multiply import selections_multiplied


def rewritten(captured: Captured) -> Captured:
    """The same graph with fewer transpositions and comparisons; ``captured`` stays as it is.

    Values count as contiguous whatever strides the trace gave them, as they are in ExecuTorch.
    """
    graph, _ = copy_of(captured.module.graph)
    module = fx.GraphModule(captured.module, graph)
    selections_multiplied(module, tuple(captured.inputs), step)
    transpositions_moved(module.graph)
    module.recompile()
    return replace(captured, module=module)
