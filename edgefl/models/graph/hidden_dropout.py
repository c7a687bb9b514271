"""Where a module drops entries by a function: only a graph can give that function a noise input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgefl.models.layers.explicit import Dropout


def dropping(module: nn.Module, x: Tensor) -> frozenset[str]:
    """Paths of the submodules in whose forward ``F.dropout`` drops entries of what is computed from ``x``.

    Found by a run in training mode, which also works where a trace does not; ``module`` and torch's generator stay
    as they are. A run that fails tells what it saw until then: whoever uses the module next meets the failure.
    """
    running: list[str] = []
    paths: set[str] = set()
    copied = copy.deepcopy(module).train()
    for path, part in copied.named_modules():
        if path and not isinstance(part, Dropout):
            part.register_forward_pre_hook(_entering(running, path), prepend=True)
            part.register_forward_hook(_leaving(running), always_call=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Watch(lambda: paths.update(running)):
        try:
            copied(x)
        except Exception:
            return frozenset(paths)
    return frozenset(paths)


def _entering(running: list[str], path: str) -> Callable[[nn.Module, object], None]:
    return lambda module, args: running.append(path)


def _leaving(running: list[str]) -> Callable[[nn.Module, object, object], None]:
    def leave(module: nn.Module, args: object, out: object) -> None:
        running.pop()

    return leave


class _Watch(TorchFunctionMode):
    """Calls ``dropped`` when a dropout function is called that changes its input."""

    def __init__(self, dropped: Callable[[], None]) -> None:
        super().__init__()
        self._dropped = dropped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is F.dropout and keywords["p"] and keywords["training"]:
            self._dropped()
        if (
            func is torch.dropout
            and _argument(1, "p", args, keywords)
            and _argument(2, "train", args, keywords)
        ):
            self._dropped()
        return func(*args, **keywords)


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs[name]
