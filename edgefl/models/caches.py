"""Tensors that a module's code puts aside in attributes while it runs: positions of the last length, a bias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_OWN = frozenset(nn.Module().__dict__)
_NONE = object()


@contextmanager
def forgotten(module: nn.Module) -> Iterator[None]:
    """Afterwards, the parts of ``module`` have no tensor in an attribute, or in a dictionary there, that they did not have
    before: those of a run without values, or on other weights, are of no use to the next."""
    before = [(part, dict(part.__dict__), _caches(part)) for part in module.modules() if _is_others(part)]
    try:
        yield
    finally:
        for part, attributes, caches in before:
            for name, value in list(part.__dict__.items()):
                old = attributes.get(name, _NONE)
                if name in _OWN or value is old or not isinstance(value, Tensor):
                    continue
                if old is _NONE:
                    del part.__dict__[name]
                else:
                    part.__dict__[name] = old
            for cache, entries in caches:
                if any(isinstance(value, Tensor) for value in cache.values()):
                    cache.clear()
                    cache.update(entries)


def _is_others(part: nn.Module) -> bool:
    return not type(part).__module__.startswith("torch.nn.")


def _caches(part: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    held = [value for name, value in part.__dict__.items() if name not in _OWN]
    return [(value, dict(value)) for value in held if type(value) is dict]
