"""What a function computes, as a digest: that of its first graph, before anything is rewritten.

All that the compiler makes of a function follows from that graph and from the ports. So one digest means one artifact,
wherever the code stands that the function comes from.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx

from edgefl.contract.algorithm import Function
from edgefl.system.collecting import collecting_later
from edgefl_export.capture.trace import Joint, joint_graph


class Joints:
    """First graphs of functions: each is traced once, for its digest, and waits for the compiler."""

    def __init__(self) -> None:
        self._traced: dict[int, tuple[Function, Joint]] = {}

    def fingerprint(self, function: Function) -> str:
        """:func:`fingerprint`, for which the function is traced."""
        with collecting_later():
            joint = joint_graph(function)
            self._traced[id(function)] = function, joint
            return fingerprint(function, joint)

    def take(self, function: Function) -> Joint | None:
        """The graph, for one that uses it up; None where the function was not traced."""
        _, joint = self._traced.pop(id(function), (function, None))
        return joint


def fingerprint(function: Function, joint: Joint | None = None) -> str:
    """SHA-256 of the function's name and ports, of every op that it runs with what that reads, and of its results.

    Constants count with their values, inputs by their names alone. ``joint``: the function's first graph where there is
    one. ExportError for a function that cannot be traced.
    """
    joint = joint or joint_graph(function)
    ports = [(name, spec) for named in (function.inputs, joint.outputs) for name, spec in named.items()]
    lines = [repr((function.name, ports)), *(_line(joint.module, node) for node in joint.module.graph.nodes)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(module: fx.GraphModule, node: fx.Node) -> str:
    """A node with all that it reads, in words that are the same in each process."""
    constant = _about(getattr(module, str(node.target))) if node.op == "get_attr" else ""
    return f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {constant}"


def _about(value: Tensor) -> str:
    """A constant with its values; a weight of a skeleton has none."""
    about = f"{tuple(value.shape)} {value.dtype} {value.device}"
    if value.is_meta:
        return about
    entries = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{about} {hashlib.sha256(entries.numpy().tobytes()).hexdigest()}"
