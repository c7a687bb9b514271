"""A list of operations as one Python function, which calls torch's kernels with as little between as there can be."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

Call = Callable[..., tuple[Tensor, ...]]


def compiled(module: fx.GraphModule) -> Call:
    """``module`` as a function of its placeholders, in order. What nobody reads any more is let go at once."""
    return _Writer(module).function()


class _Writer:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._known: dict[str, Any] = {}
        self._names: dict[fx.Node, str] = {}
        self._last = {used: node for node in module.graph.nodes for used in node.all_input_nodes}

    def function(self) -> Call:
        nodes = list(self._module.graph.nodes)
        given = [self._name(node) for node in nodes if node.op == "placeholder"]
        lines = [line for node in nodes for line in self._lines(node)]
        text = "\n    ".join((f"def run({', '.join(given)}):", *lines))
        exec(compile(text, "<recorded>", "exec"), self._known)
        run: Call = self._known["run"]
        return run

    def _lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            self._names[node] = self._bound(getattr(self._module, str(node.target)))
            return []
        if node.op == "output":
            return [f"return {self._text(node.args[0])}"]
        dying = [
            self._name(used)
            for used in node.all_input_nodes
            if self._last[used] is node and used.op != "get_attr"
        ]
        drop = [f"{' = '.join(dying)} = None"] if dying else []
        return [f"{self._name(node)} = {self._call(node)}", *drop]

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{node.args[1]}]"
        # An overload's own kernel: what stands around it in Python would cost as much as a small kernel.
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        parts = [self._text(each) for each in node.args]
        parts += [f"{key}={self._text(each)}" for key, each in node.kwargs.items()]
        return f"{self._bound(target)}({', '.join(parts)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, list | tuple):
            inner = "".join(f"{self._text(each)}, " for each in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        return repr(value) if type(value) in (int, bool, type(None)) else self._bound(value)

    def _name(self, node: fx.Node) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _bound(self, value: Any) -> str:
        name = f"k{len(self._known)}"
        self._known[name] = value
        return name
