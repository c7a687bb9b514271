"""Deep copies of modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from edgefl.models.spaces import SlotSpace
from edgefl.models.swapped import Swap, heeding

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of ``module``.

    Tensors that its code computed and keeps are copied detached: torch itself refuses to copy them, such as the weight that
    pruning or the older ``weight_norm`` sets in a pre-hook. Functions that refer to modules, such as the hook
    ``lambda module, args, out: out * self.scale``, refer to the copies.

    Args:
        module: the module to copy; it is not changed.
        memo: copies to use instead of making one, by the ``id`` of the original, as for ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    with torch.no_grad(), _Detaching(), _copying():
        made = copy.deepcopy(module, memo)
        for part in module.modules():
            # torch's own copy of a module leaves out what its class keeps in __slots__.
            for name, value in SlotSpace(part).read().items():
                SlotSpace(memo[id(part)]).write(name, copy.deepcopy(value, memo))
    for part in made.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = [_GONE] * len(part._flat_weights_names)
    return made


def _state(self: nn.RNNBase) -> dict[str, Any]:
    """Return the state of a recurrent layer without its list of weights, which torch's own would compute for it:
    a parametrization, such as spectral norm, moves its buffers each time."""
    state = self.__dict__.copy()
    del state["_flat_weight_refs"]
    return state | {"_flat_weights": [None] * len(self._flat_weights_names)}


def _copy_traced(self: fx.GraphModule, memo: dict[int, Any]) -> fx.GraphModule:
    """Copy an fx module as any other: torch's own copy loses hooks, attributes, and all of them in submodules whose tensors
    the graph reads."""
    made = type(self).__new__(type(self))
    memo[id(self)] = made
    attributes = {name: value for name, value in self.__dict__.items() if name != "_graph"}
    made.__dict__.update(copy.deepcopy(attributes, memo))
    made.graph = copy.deepcopy(self.graph, memo)
    return made


# A reference to nothing: torch gathers the weights when the layer is called next.
_GONE: weakref.ref[Any] = weakref.ref(set())


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if not _copying.here() or not any(map(_refers_to_module, _captured(function))):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells if cells else None
    )
    memo[id(function)] = made  # before its cells are copied: a function may refer to itself
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        if _is_filled(original):
            cell.cell_contents = copy.deepcopy(original.cell_contents, memo)
    made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _captured(function: FunctionType) -> Iterator[object]:
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _refers_to_module(value: object, depth: int = 3) -> bool:
    if isinstance(value, nn.Module | nn.Parameter):
        return True
    if isinstance(value, Tensor) or not depth:
        return False
    if isinstance(value, MethodType):
        return _refers_to_module(value.__self__, depth - 1)
    if type(value) in (list, tuple, dict):
        items = value.values() if isinstance(value, dict) else cast(list[object], value)
        return any(_refers_to_module(each, depth - 1) for each in items)
    return isinstance(value, FunctionType) and any(
        _refers_to_module(each, depth - 1) for each in _captured(value)
    )


class _Dispatch:
    """The entry for functions in the table of ``copy.deepcopy``, as an attribute for :class:`Swap`."""

    @property
    def functions(self) -> Any:
        return copy._deepcopy_dispatch[FunctionType]  # type: ignore[attr-defined]

    @functions.setter
    def functions(self, handler: Any) -> None:
        copy._deepcopy_dispatch[FunctionType] = handler  # type: ignore[attr-defined]


class _Detaching(TorchFunctionMode):
    """Copies tensors that are no leaves as if they were."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **kwargs or {})
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]


_copying: Swap = Swap(
    (nn.RNNBase, "__getstate__", heeding(lambda: _copying, nn.RNNBase.__getstate__, _state)),
    (
        fx.GraphModule,
        "__deepcopy__",
        heeding(lambda: _copying, fx.GraphModule.__deepcopy__, _copy_traced),
    ),
    (_Dispatch(), "functions", _copy_function),
)
