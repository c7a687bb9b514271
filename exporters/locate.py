"""Where in the user's code an op comes from: runs the function once more, in torch, and watches."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.programs.contract import Function

_ROOMS = (Path(torch.__file__).parent, Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """The op as the user's code calls it, module path as in ``named_modules``, ``file:line``; empty if unknown."""

    op: str = ""
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        parts = [
            f"in module {self.module}" if self.module else "",
            f"at {self.source}" if self.source else "",
        ]
        return ", ".join(part for part in parts if part) or "in the backward pass or inside another op"


def locate(function: Function, op: str) -> Place:
    """Place of the first call of ``op`` (``aten.name.overload``), or of the op that it is a part of.

    An empty Place if torch never calls it itself, as for an op that only a decomposition uses.
    """
    watch = _Watch(op)
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


class _Watch(TorchDispatchMode):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.name = op.split(".")[1].strip("_")
        self.stack: list[nn.Module] = []
        self.place = Place()

    def pop(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place == Place() and self.name in str(func).split(".")[1]:
            self.place = Place(str(func), _path(self.stack), _source())
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
