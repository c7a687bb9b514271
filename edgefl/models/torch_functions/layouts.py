"""Layouts of tensors, which determine the result of an operation without values, and a mode that caches
results by layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_LOOKUPS = 1 << 16


class TensorLayout(NamedTuple):
    """Layout of a tensor, without its values. It determines the layout of an operation's result.

    ``strides`` and ``offset`` (position of the first entry in the storage) count entries.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self, device: torch.device = META) -> Tensor:
        """Return a tensor with this layout on ``device``. Its values, if the device has any, are zeros."""
        if not self.offset or 0 in self.shape:
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
            return made if device == META else made.zero_()
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.zeros(self.offset + reach + 1, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides, self.offset)


class ListKey(NamedTuple):
    """Hashable key of a list or tuple: its type and the keys of its items."""

    kind: type
    items: tuple[Any, ...]


def layout_key(value: Any) -> Any:
    """Return a hashable key of an argument of an operation, which :func:`from_key` turns back into an argument.

    Tensors become layouts, lists and tuples become :class:`ListKey`, and any other value a pair (type, value).
    """
    if isinstance(value, Tensor):
        return TensorLayout(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)
    if isinstance(value, tuple | list):
        kind = type(value) if type(value) in (list, torch.Size) else tuple  # named results are made otherwise
        return ListKey(kind, tuple(map(layout_key, value)))
    return type(value), value  # numbers are equal whatever their type is, and a type decides that of a result


def from_key(key: Any, device: torch.device = META) -> Any:
    """Return the argument that a key of :func:`layout_key` describes, with new tensors on ``device``."""
    if isinstance(key, TensorLayout):
        return key.tensor(device)
    if isinstance(key, ListKey):
        return key.kind(from_key(item, device) for item in key.items)
    return key[1]


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Run the ``with`` block on the meta device without gradients. Results of operations are cached."""
    with torch.no_grad(), META, _CachingMode():  # type: ignore[no-untyped-call]
        yield


class _CachingMode(TorchDispatchMode):
    """Mode that computes each operation on the meta device once per layout of its arguments.

    Torch takes milliseconds for operations that it decomposes in Python.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        inputs = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor)]
        plain = [each.is_meta and not each.is_complex() for each in inputs]
        if not (plain and all(plain) and _makes_new(func)):
            return func(*args, **named)
        numbers = torch.get_default_dtype()
        return from_key(_result(func, layout_key(args), layout_key(tuple(named.items())), numbers))


@functools.cache
def _makes_new(func: OpOverload) -> bool:
    """Return True if an operation writes to no argument and returns only new tensors."""
    schema = func._schema
    new = [each.alias_info is None and str(each.type) == "Tensor" for each in schema.returns]
    return all(new) and not schema.is_mutable


@functools.lru_cache(_LOOKUPS)
def _result(func: Any, args: ListKey, kwargs: ListKey, numbers: torch.dtype) -> Any:
    """Compute an operation on the meta device and return the key of its result. Results are cached.

    Args:
        func: Operation.
        args: Key of its positional arguments.
        kwargs: Key of its keyword arguments, as pairs (name, value).
        numbers: Torch's default dtype, which also determines the result.
    """
    return layout_key(func(*from_key(args), **dict(from_key(kwargs))))
