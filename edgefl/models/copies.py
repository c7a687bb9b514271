"""Deep copies of modules."""

from __future__ import annotations

import copy
import weakref
from types import CellType, FunctionType, MethodType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgefl.models.swapped import Swap, heeding

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of ``module``, with detached copies of the tensors that its code computed and keeps.

    ``memo`` maps ids of objects to what takes their place in the copy. Torch itself refuses to copy computed tensors,
    such as the weight that pruning or the older ``weight_norm`` sets in a pre-hook.
    """
    memo = {} if memo is None else memo
    with torch.no_grad(), _Detaching(), _copying():
        made = copy.deepcopy(module, memo)
    for part in made.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = [_GONE] * len(part._flat_weights_names)
        for held in (part.__dict__, *(each for each in part.__dict__.values() if isinstance(each, dict))):
            held.update({name: _rebound(value, memo) for name, value in held.items() if _has_closure(value)})
    return made


def _state(self: nn.RNNBase) -> dict[str, Any]:
    """Return the state of a recurrent layer without its list of weights, which torch's own would compute for it:
    a parametrization, such as spectral norm, moves its buffers each time."""
    state = self.__dict__.copy()
    del state["_flat_weight_refs"]
    return state | {"_flat_weights": [None] * len(self._flat_weights_names)}


_copying: Swap = Swap(
    (nn.RNNBase, "__getstate__", heeding(lambda: _copying, nn.RNNBase.__getstate__, _state)),
)
# A reference to nothing: torch gathers the weights when the layer is called next.
_GONE: weakref.ref[Any] = weakref.ref(set())


def _has_closure(value: object) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__closure__ is not None


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return ``function`` for the copies of the modules and tensors that it refers to: a hook, or a patched forward."""
    cells = tuple(_cell(cell, memo) for cell in function.__closure__ or ())
    if cells == function.__closure__:
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    if _has_closure(value):
        made: Any = _rebound(value, memo)
    elif isinstance(value, MethodType):
        made = MethodType(value.__func__, memo.get(id(value.__self__), value.__self__))
    else:
        made = memo.get(id(value), value)
    return CellType(made) if made is not value else cell


class _Detaching(TorchFunctionMode):
    """Copies tensors that are no leaves as if they were."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **kwargs or {})
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]
