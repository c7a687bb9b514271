"""Which state may be written where it was read: nobody reads the old value once the new one is being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from edgefl.programs.contract import role_of
from exporters.capture import Captured
from exporters.executorch.graph import VIEWS, results
from exporters.executorch.partition import Step
from exporters.memory import is_pointwise

_aten = torch.ops.aten
LATE = VIEWS | {_aten.permute.default, _aten.transpose.int, _aten.t.default}
"""Ops that may read their argument as late as those that read them do."""

CLAMPS = frozenset({_aten.relu.default, _aten.hardtanh.default, _aten.clamp.default, _aten.clamp_min.default})

Time = tuple[int, int]


def in_place(captured: Captured, module: fx.GraphModule, steps: Sequence[Step]) -> tuple[str, ...]:
    """State ports whose output may have the memory of their input, in the order of the outputs."""
    times = {node: (turn, at) for turn, step in enumerate(steps) for at, node in enumerate(step.nodes)}
    fused = {node: at for step in steps if step.delegated for node, at in _fused(step)}
    old = dict(zip(captured.inputs, module.graph.find_nodes(op="placeholder"), strict=True))
    return tuple(
        name
        for name, new in zip(captured.outputs, results(module.graph), strict=True)
        if role_of(name) == "state" and name in old and _is_free(old[name], new, times, fused)
    )


def _is_free(old: fx.Node, new: fx.Node, times: dict[fx.Node, Time], fused: dict[fx.Node, fx.Node]) -> bool:
    before, after = old.meta["val"], new.meta["val"]
    if (before.shape, before.dtype) != (after.shape, after.dtype) or new not in times:
        return False
    for reader in _readers(old):
        if reader is new:
            if not is_pointwise(new) or old not in new.all_input_nodes:
                return False
        elif times[reader] > times[new] or reader is fused.get(new):
            return False
    return True


def _fused(step: Step) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Clamps with what XNNPACK runs them as a part of: it writes their result while it reads its own arguments."""
    for node in step.nodes:
        if node.target not in CLAMPS:
            continue
        made = node.all_input_nodes[0]
        while made.op == "call_function" and made.target in VIEWS | CLAMPS:
            made = made.all_input_nodes[0]
        if made in step.nodes and not is_pointwise(made):
            yield node, made


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the memory of ``node`` when they run."""
    for user in node.users:
        if user.op != "call_function":
            continue
        if user.target in LATE:
            yield from _readers(user)
        if user.target not in VIEWS:
            yield user
