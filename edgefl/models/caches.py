"""Tensors that a module's code puts aside while it runs: positions of the last length, a bias, a cosine table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from torch import Tensor, nn

_OWN = frozenset(nn.Module().__dict__)
# More in one list or dictionary are data, such as the words of a vocabulary.
_ENTRIES = 4096
_DEPTH = 4


@contextmanager
def forgotten(module: nn.Module) -> Iterator[None]:
    """Afterwards, where a part of ``module`` put a tensor aside, all attributes and buffers of all parts are those of
    before, with the lists and dictionaries among them: the tensor is of a run without values, or on other weights, and
    what says that it is there (``self.length = n``) may stand in another part."""
    before = [_Kept(part) for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
    try:
        yield
    finally:
        if any(kept.has_more() for kept in before):
            for kept in before:
                kept.put_back()


class _Kept:
    """What one part holds beside its parameters and submodules."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._attributes = _attributes(part)
        self._buffers = dict(part._buffers)
        self._unsaved = set(part._non_persistent_buffers_set)
        self._inside = [(each, each.copy()) for each in _changeable(self._attributes)]
        # The tensors themselves: the number of one that is gone may be another's.
        self._known = {id(each): each for each in _tensors([self._attributes, self._buffers])}

    def has_more(self) -> bool:
        """Whether there is a tensor that was not there before."""
        now = _tensors([_attributes(self._part), self._part._buffers])
        return any(id(each) not in self._known for each in now)

    def put_back(self) -> None:
        for name in _attributes(self._part).keys() - self._attributes.keys():
            del self._part.__dict__[name]
        self._part.__dict__.update(self._attributes)
        for now, then in ((self._part._buffers, self._buffers), *self._inside):
            if isinstance(now, dict):
                now.clear()
                now.update(then)
            else:
                now[:] = then
        self._part._non_persistent_buffers_set.intersection_update(self._unsaved)


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if name not in _OWN}


def _tensors(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and _is_container(value):
        for each in _items(value):
            yield from _tensors(each, depth - 1)


def _changeable(value: object, depth: int = _DEPTH) -> Iterator[dict[Any, Any] | list[Any]]:
    """The lists and dictionaries in ``value``, however deep a tensor is looked for."""
    if depth and _is_container(value):
        for each in _items(value):
            if _is_container(each) and not isinstance(each, tuple):
                yield each
            yield from _changeable(each, depth - 1)


def _items(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _is_container(value: object) -> TypeGuard[dict[Any, Any] | list[Any] | tuple[Any, ...]]:
    return (
        isinstance(value, dict | list | tuple)
        and type(value) in (dict, list, tuple)
        and len(value) <= _ENTRIES
    )
