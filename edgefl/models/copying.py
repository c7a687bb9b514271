"""Deep copies of modules whose functions refer to the copy.

``copy.deepcopy`` shares functions. A hook such as ``lambda module, args, out: out * self.scale`` would go on to read the
weights of the original, which nobody trains.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from edgefl.models.swapped import Swap

_Module = TypeVar("_Module", bound=nn.Module)


def copied(module: _Module, memo: dict[int, object] | None = None) -> _Module:
    """Return a deep copy of ``module``.

    Args:
        module: the module to copy; it is not changed.
        memo: copies to use instead of making one, by the ``id`` of the original, as for ``copy.deepcopy``.
    """
    with _functions():
        return copy.deepcopy(module, {} if memo is None else cast(dict[int, Any], memo))


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if not _functions.here() or not any(map(_refers_to_module, _captured(function))):
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


_functions = Swap((_Dispatch(), "functions", _copy_function))
