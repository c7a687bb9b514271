"""Digests of functions: that of the traced graph, before anything is rewritten.

All that the compiler makes of a function follows from that graph and from the ports. So one digest means one artifact,
wherever the code of the function comes from.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx

from edgefl.contract.algorithm import Function
from edgefl.system.memory import collecting_later
from edgefl_export.capture.graph import TracedFunction
from edgefl_export.capture.trace import trace


class TraceCache:
    """First passes of functions: each function is traced once, for its fingerprint, and its graph waits for the compiler."""

    def __init__(self) -> None:
        self._traced: dict[int, TracedFunction] = {}

    def fingerprint(self, function: Function) -> str:
        """Trace ``function``, keep the graph, and return its :func:`fingerprint`."""
        with collecting_later():
            traced = self._traced[id(function)] = trace(function)
            return fingerprint(traced)

    def take(self, function: Function) -> TracedFunction:
        """Return the graph of ``function``, traced now if it does not wait here, for a caller who uses it up."""
        return self._traced.pop(id(function), None) or trace(function)


def fingerprint(traced: TracedFunction) -> str:
    """Return the SHA-256 of a function's name and ports, of every op with its arguments, and of its results.

    Constants count with their values, inputs by their names alone.
    """
    function = traced.function
    ports = [(name, spec) for named in (function.inputs, traced.outputs) for name, spec in named.items()]
    lines = [
        repr((function.name, ports)),
        *(_line(traced.module, node) for node in traced.module.graph.nodes),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(module: fx.GraphModule, node: fx.Node) -> str:
    """Return a node with its arguments as text that is the same in each process."""
    constant = _about(getattr(module, str(node.target))) if node.op == "get_attr" else ""
    return f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {constant}"


def _about(value: Tensor) -> str:
    """Return shape, dtype and a digest of the values of a constant; a weight of a skeleton has no values."""
    about = f"{tuple(value.shape)} {value.dtype} {value.device}"
    if value.is_meta:
        return about
    entries = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{about} {hashlib.sha256(entries.numpy().tobytes()).hexdigest()}"
