"""Layouts of tensors, which decide what an operation gives without values, and a mode that looks results up by them."""

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

NOWHERE = torch.device("meta")
_LOOKUPS = 1 << 16


class Layout(NamedTuple):
    """All that an op's result without values depends on, and all of that result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self, device: torch.device = NOWHERE) -> Tensor:
        """Return a tensor of this layout, of zeros if it has values."""
        if not self.offset or 0 in self.shape:
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
            return made if device == NOWHERE else made.zero_()
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.zeros(self.offset + reach + 1, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides, self.offset)


class Listed(NamedTuple):
    """A list or tuple that can be looked up."""

    kind: type
    items: tuple[Any, ...]


def closed(value: Any) -> Any:
    """Return ``value`` as a key, with layouts for tensors."""
    if isinstance(value, Tensor):
        return Layout(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)
    if isinstance(value, tuple | list):
        kind = type(value) if type(value) in (list, torch.Size) else tuple  # named results are made otherwise
        return Listed(kind, tuple(map(closed, value)))
    return type(value), value  # numbers are equal whatever their type is, and a type decides that of a result


def opened(key: Any, device: torch.device = NOWHERE) -> Any:
    """Return the arguments of a key, with new tensors."""
    if isinstance(key, Layout):
        return key.tensor(device)
    if isinstance(key, Listed):
        return key.kind(opened(item, device) for item in key.items)
    return key[1]


@contextmanager
def nowhere() -> Iterator[None]:
    """Run code on the meta device, without gradients."""
    with torch.no_grad(), NOWHERE, _Remembering():  # type: ignore[no-untyped-call]
        yield


class _Remembering(TorchDispatchMode):
    """Mode that computes the results of an operation on the meta device once for the same layouts: torch takes milliseconds
    for those that it decomposes in Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        inputs = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor)]
        plain = [each.is_meta and not each.is_complex() for each in inputs]
        if not (plain and all(plain) and _makes_new(func)):
            return func(*args, **named)
        numbers = torch.get_default_dtype()
        return opened(_result(func, closed(args), closed(tuple(named.items())), numbers))


@functools.cache
def _makes_new(func: OpOverload) -> bool:
    """Return True if an operation writes to none of its arguments and all its results are new tensors."""
    schema = func._schema
    new = [each.alias_info is None and str(each.type) == "Tensor" for each in schema.returns]
    return all(new) and not schema.is_mutable


@functools.lru_cache(_LOOKUPS)
def _result(func: Any, args: Listed, kwargs: Listed, numbers: torch.dtype) -> Any:
    """Return the closed result. ``numbers``: torch's default type for them, which is not passed on."""
    return closed(func(*opened(args), **dict(opened(kwargs))))
