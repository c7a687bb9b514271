"""A batch norm whose class does more than normalise, such as timm's with an activation behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgefl.models.layers.explicit import BatchNorm
from edgefl.wire.errors import ModelError

NORM = "norm"
"""The name of the batch norm in what surrounds it."""


class Surrounded(nn.Module):
    """The forward of ``old``, in which ``norm`` normalises. The submodules of ``old`` keep their names; its weights and
    statistics are those of ``norm``."""

    norm: BatchNorm
    old: nn.Module

    def __init__(self, old: nn.modules.batchnorm._BatchNorm, norm: BatchNorm) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)
        self.add_module(NORM, norm)
        for tensors in (old._parameters, old._buffers):
            tensors.update(dict.fromkeys(tensors))
        self.__dict__["old"] = old  # beside the submodules: it holds the same
        self.train(old.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.old.training = self.training
        with _Normalising(self.norm) as normalising:
            result = self.old(*args, **kwargs)
        if normalising.calls != 1:
            raise ModelError(
                f"{type(self.old).__name__} is a batch norm that calls F.batch_norm {normalising.calls} times in its "
                "forward, where edgefl has to see one; use nn.BatchNorm2d and a layer beside it"
            )
        return result


class _Normalising(TorchFunctionMode):
    """Inside, ``F.batch_norm`` is ``norm``."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__()
        self._norm = norm
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        self.calls += 1
        x: Tensor = args[0] if args else kwargs["input"]
        return self._norm(x)


def own_name(module: nn.Module, name: str) -> str:
    """What ``name``, of a tensor of ``module``, was before batch norms were surrounded."""
    path, _, last = name.rpartition(".")
    outer, _, inner = path.rpartition(".")
    if inner == NORM and isinstance(module.get_submodule(outer), Surrounded):
        return f"{outer}.{last}" if outer else last
    return name
