"""Restoring of Python state that a module's code changes while it is traced or runs on tensors without values."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Generator, Tensor, nn

from edgefl.models.references import LruCache, References
from edgefl.models.spaces import Space

# A result may be a tuple or dictionary of tensors.
_LEVELS = 4
_PLAIN = (dict, list, tuple, set, frozenset)
Held = tuple[Space, dict[Any, Any]]


@contextmanager
def forgotten(module: nn.Module) -> Iterator[list[Held]]:
    """Restore on exit the Python state that the code of ``module`` can change.

    Restored are the attributes and buffers of all parts, and the globals, class attributes, closures, default arguments
    and plain objects that their code mentions, with the lists, dictionaries and sets in them. Torch's generators among
    them go back to their states. The state is of a run without values or on other weights, so a tensor or a counter from
    it must not reach the next run.

    ``functools.lru_cache`` caches with tensors are cleared before and after: a tensor from outside does not fit a run
    without values, nor the other way round.

    Yields each space with its values.
    """
    found = References(module)
    before = [(space, space.read()) for space in found.spaces]
    held = (each for _, values in before for each in values.values())
    states = [(each, each.get_state()) for each in held if isinstance(each, Generator)]
    _clear(found.caches)
    try:
        yield before
    finally:
        for generator, state in states:
            generator.set_state(state)
        for space, values in before:
            space.restore(values)
        _clear(found.caches)


def move_to_meta(held: list[Held]) -> list[tuple[Tensor, Tensor]]:
    """Replace the tensors in ``held`` by tensors on the meta device; return each of these with its original.

    An operation refuses arguments on different devices, except numbers. :func:`forgotten` restores the originals.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def on_meta(value: object) -> object:
        if type(value) is tuple:
            parts = tuple(map(on_meta, value))
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if not isinstance(value, Tensor) or value.is_meta or not value.dim():
            return value
        if id(value) not in moved:
            moved[id(value)] = value.detach().to("meta"), value
        return moved[id(value)][0]

    for space, values in held:
        for key, value in values.items():
            if (replaced := on_meta(value)) is not value:
                space.write(key, replaced)
    return list(moved.values())


def _clear(caches: list[LruCache[Any]]) -> None:
    """Clear the caches that hold tensors. Others may hold objects that must stay the same."""
    for cache in caches:
        if cache.cache_info().currsize and _has_tensor(cache):
            cache.cache_clear()


def _has_tensor(cache: LruCache[Any]) -> bool:
    # The results are referents of a bounded cache, and values of the dictionary that is one of an unbounded cache.
    found = [each for each in gc.get_referents(cache) if each is not vars(cache)]
    for _ in range(_LEVELS):
        if any(isinstance(each, Tensor) for each in found):
            return True
        found = gc.get_referents(*(each for each in found if isinstance(each, _PLAIN)))
    return False
