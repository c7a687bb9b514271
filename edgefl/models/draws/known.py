"""Values that are the same for every input, while a model runs on tensors without values.

Code asks for numbers of tensors that it has just made of constants: ``torch.linspace(0, 1, 5).tolist()``, whether a mask is
the causal one, a span as ``torch.tensor(16)``. Such tensors have twins here, made by the same calls on real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.models.draws.rules import RULES

_MADE = frozenset(
    {"tensor", "as_tensor", "scalar_tensor", "arange", "linspace", "logspace", "zeros", "ones", "full", "eye"}
    | {"tril_indices", "triu_indices"}
)
_ASKED = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_OF_NUMBERS = frozenset({"clamp", "clip", "clamp_", "arange", "linspace"})
_WRITING = frozenset({"__setitem__", "__set__"}) | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
# More is never asked for, and costs time and memory.
_ENTRIES = 1 << 16


class Known:
    """The twins of tensors, by the calls that a mode sees."""

    def __init__(self) -> None:
        self._twins: Any = WeakTensorKeyDictionary()

    def answer(self, name: str, args: Any) -> Any:
        """What a tensor's own method for a Python value gives; NotImplemented where nothing tells."""
        if name in _ASKED and isinstance(args[0], Tensor) and args[0] in self._twins:
            with _apart():
                return getattr(self._twins[args[0]], name)()
        return NotImplemented

    def add(self, tensor: Tensor, values: Tensor) -> None:
        """Make ``values`` the twin of ``tensor``."""
        if _is_small(values):
            self._twins[tensor] = values

    def note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Make the twin of ``result``, where all that ``func`` was given is known."""
        written = writes(name, kwargs)
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        known = name in _MADE or any(each in self._twins for each in _tensors(args, kwargs))
        twins = self._twins_of(args, kwargs) if known and (written or results) and name not in RULES else None
        if twins is None or not all(map(_is_small, results)):
            if written and self._twins:
                self._forget(_tensors(args, kwargs))
            return
        with _apart(), torch.no_grad(), _Undrawn():  # type: ignore[no-untyped-call]
            try:
                found = pytree.tree_leaves(func(*twins[0], **twins[1]))
            except Exception:  # such as of a device that has no values, or of one that is drawn
                if written:
                    self._forget(_tensors(args, kwargs))
                return
        for each, twin in zip(results, (each for each in found if isinstance(each, Tensor)), strict=False):
            if each.shape == twin.shape:
                self._twins[each] = twin
            else:
                self._twins.pop(each, None)

    def numbers(self, name: str, args: Any) -> Any:
        """``args`` of a call with numbers where torch would take them out of tensors that are known: bounds of slices, of
        clamp and of ranges."""
        if name in _OF_NUMBERS:
            return tuple(
                self._number(each) if place or name in _MADE else each for place, each in enumerate(args)
            )
        if name not in ("__getitem__", "__setitem__"):
            return args
        index = args[1]
        parts = tuple(map(self._bounds, index)) if type(index) is tuple else self._bounds(index)
        return args[0], parts, *args[2:]

    def _bounds(self, part: object) -> object:
        if not isinstance(part, slice):
            return part
        bounds = (part.start, part.stop, part.step)
        if not any(isinstance(each, Tensor) for each in bounds):
            return part
        return slice(*map(self._number, bounds))

    def _number(self, value: object) -> object:
        if not isinstance(value, Tensor) or value.dim():
            return value
        number = self.answer("item", (value,))
        return value if number is NotImplemented else number

    def _forget(self, written: Iterable[Tensor]) -> None:
        """What shares memory with one of the tensors that a call may have written to."""
        memory = set(map(_memory, written))
        for each in [each for each in self._twins if None in memory or _memory(each) in memory]:
            del self._twins[each]

    def _twins_of(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with twins for tensors, on the processor; None if one has none."""
        leaves, spec = pytree.tree_flatten(
            (args, {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)
        )
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return None
        if any(isinstance(leaf, Tensor) and leaf not in self._twins for leaf in leaves):
            return None
        found = [self._twins[leaf] if isinstance(leaf, Tensor) else _here(leaf) for leaf in leaves]
        twins: tuple[Any, Any] = pytree.tree_unflatten(found, spec)
        return twins


class _Undrawn(TorchDispatchMode):
    """While it is on, nothing is drawn: a number that is another in each step is not the same for every input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws")
        return func(*args, **(kwargs or {}))


def writes(name: str, kwargs: Any) -> bool:
    """Return True if the function or method of torch of this name writes into an argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in kwargs


def _here(leaf: object) -> object:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_small(tensor: Tensor) -> bool:
    return all(type(size) is int for size in tensor.shape) and tensor.numel() <= _ENTRIES


@contextmanager
def _apart() -> Iterator[None]:
    """Calls inside are torch's own, on values: no mode sees them, nor a gradient that is being taken."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def _memory(tensor: Tensor) -> int | None:
    """What is the same of all that share memory; None of what has none to itself."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            address: int = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return None
        return address


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for each in (*args, *kwargs.values()):
        for part in each if isinstance(each, list | tuple) else (each,):
            if isinstance(part, Tensor):
                yield part
