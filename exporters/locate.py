"""Where in the user's code an op comes from: runs the function once more, in torch, and watches."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.programs.contract import Function
from exporters.decompositions import core_table

_ROOMS = (Path(torch.__file__).parent, Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """The op as torch calls it, module path as in ``named_modules``, ``file:line``; empty if unknown.

    ``backward``: the op belongs to a gradient; module and line are those of the forward op that it belongs to.
    """

    op: str = ""
    module: str = ""
    source: str = ""
    backward: bool = False

    def __str__(self) -> str:
        parts = [
            "in the gradient of what is called" if self.backward else "",
            f"in module {self.module}" if self.module else "",
            f"at {self.source}" if self.source else "",
        ]
        return ", ".join(part for part in parts if part) or "in the backward pass or inside another op"


def locate(function: Function, op: str) -> Place:
    """Place of the first call of ``op`` (``aten.name.overload``), or of the op that it is a part of.

    An empty Place if no call leads to it.
    """
    place = _watched(function, _Watch(_named(op)))
    return place if place != Place() else _watched(function, _Watch(_decomposes_into(op)))


def _watched(function: Function, watch: _Watch) -> Place:
    enter = register_module_forward_pre_hook(lambda module, args: watch.stack.append(module))
    leave = register_module_forward_hook(lambda module, args, out: watch.pop(), always_call=True)
    try:
        with watch:
            function(function.example(0))
    except Exception:
        return watch.place  # the function failed by itself; what was seen until then still helps
    finally:
        enter.remove()
        leave.remove()
    return watch.place


def _named(op: str) -> Callable[..., bool]:
    """An op of that name, or one that the name is a part of: ``_linalg_svd`` for ``linalg_svd``."""
    name = op.split(".")[1].strip("_")
    return lambda func, args, kwargs: name in str(func).split(".")[1]


def _decomposes_into(op: str) -> Callable[..., bool]:
    """An op that our rules or PyTorch's rewrite into ``op``, among others; each op is tried once."""
    decided: dict[object, bool] = {}
    rules = {**torch._decomp.decomposition_table, **core_table()}
    rules = {func: rule for func, rule in rules.items() if str(func) != op}

    def wanted(func: Any, args: Any, kwargs: Any) -> bool:
        if func not in decided:
            trace = make_fx(
                lambda: func(*args, **kwargs),
                decomposition_table=rules,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )
            decided[func] = any(str(node.target) == op for node in trace().graph.nodes)
        return decided[func]

    return wanted


class _Watch(TorchDispatchMode):
    """Runs ops and remembers where the first one comes from for which ``wanted(op, args, kwargs)`` holds."""

    def __init__(self, wanted: Callable[..., bool]) -> None:
        super().__init__()
        self.wanted = wanted
        self.stack: list[nn.Module] = []
        self.place = Place()
        self._forward: dict[int, tuple[str, str]] = {}  # module and line of each gradient's forward op

    def pop(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gradient = torch._C._current_autograd_node()
        if gradient is None:
            # Autograd has just numbered the node of this op; an op without one must not take the last one's place.
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, (_path(self.stack), _source()))
        if self.place == Place() and self.wanted(func, args, kwargs or {}):
            if gradient is None:
                self.place = Place(str(func), _path(self.stack), _source())
            else:
                self.place = Place(str(func), *self._forward.get(gradient._sequence_nr(), ("", "")), True)
        return func(*args, **(kwargs or {}))


def _path(stack: list[nn.Module]) -> str:
    """Dotted path of the innermost module, with its class."""
    if not stack:
        return ""
    inner = stack[-1]
    for outer in stack:
        for name, module in outer.named_modules():
            if module is inner and name:
                return f"{name} ({type(inner).__name__})"
    return type(inner).__name__


def _source() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.exists() and not any(room in path.parents for room in _ROOMS):
            return f"{frame.filename}:{frame.lineno}"
    return ""
