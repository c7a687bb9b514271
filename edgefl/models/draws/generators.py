"""Replacement of the random generators of Python and numpy in the thread that traces a model.

A drawn number would be a constant of the graph. In the thread that traces, one uniform number is therefore a
:class:`~edgefl.models.draws.chance.Chance`, and any other draw raises ModelError. Other threads draw as always.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
from torch import nn

from edgefl.models.draws.chance import Chance, refused, seeded
from edgefl.models.references import References
from edgefl.models.swapped import Place, Swap, heeding

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_UNIFORM = frozenset({"random", "rand", "random_sample", "sample", "ranf"})
_OTHER = frozenset({"getstate", "get_state", "spawn", "bit_generator"})
_SEEDING = frozenset({"seed", "setstate", "set_state"})
_NUMPY: Any = np.random.mtrand
_PYTHON: Any = random


class GeneratorStandIn:
    """A generator whose draws are those of :func:`_drawing`. isinstance() takes it for the generator."""

    def __init__(self, original: Any) -> None:
        self._original = original

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = type(self._original)
        return kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        return (
            value if name.startswith("_") or name in _OTHER or not callable(value) else _drawing(value, name)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._original.__reduce_ex__(protocol)


def _drawing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``original`` for other threads; for the thread that traces, a function that gives a Chance or raises."""

    def drawn(*arguments: Any, **named: Any) -> Any:
        if not named and not arguments and name in (*_UNIFORM, "uniform"):
            return Chance(0.5)
        if not named and name == "uniform" and len(arguments) == 2 and all(map(_is_number, arguments)):
            return Chance(sum(arguments) / 2)
        raise seeded() if name in _SEEDING else refused()

    return heeding(lambda: middled, original, drawn)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return numpy's ``default_rng``, with a stand-in for a generator without a seed: its numbers are new in each step."""

    def made(seed: Any = None) -> Any:
        return GeneratorStandIn(original()) if seed is None else original(seed)

    return heeding(lambda: middled, original, made)


def _places() -> Iterator[Place]:
    for room, generator in ((_PYTHON, _PYTHON._inst), (np.random, _NUMPY._rand)):
        for name, value in vars(room).items():
            if getattr(value, "__self__", None) is generator and name not in _OTHER:
                yield room, name, _drawing(value, name)
    for name in ("sample", "ranf"):
        yield np.random, name, _drawing(getattr(np.random, name), name)
    yield np.random, "default_rng", _seeded(np.random.default_rng)
    # Objects that other libraries draw from, such as scipy.
    yield _PYTHON, "_inst", GeneratorStandIn(_PYTHON._inst)
    yield _NUMPY, "_rand", GeneratorStandIn(_NUMPY._rand)


_PLACES = list(_places())
_FUNCTIONS = {id(getattr(room, name)): ours for room, name, ours in _PLACES}
middled = Swap(*_PLACES)
"""Inside, draws of this thread by the functions of ``random`` and ``numpy.random`` are a Chance or raise ModelError."""


@contextmanager
def watched(module: nn.Module) -> Iterator[None]:
    """Enter :data:`middled`, also for generators, and functions imported by name, that the code of ``module`` refers to."""
    with middled():
        replaced = [
            (space, key, value, ours)
            for space in References(module).spaces
            for key, value in space.read().items()
            if (ours := _stand_in(value)) is not value
        ]
        try:
            for space, key, _, ours in replaced:
                space.write(key, ours)
            yield
        finally:
            for space, key, value, ours in replaced:
                if space.read().get(key) is ours:
                    space.write(key, value)


def _stand_in(value: Any) -> Any:
    """Return what replaces ``value`` in the thread that traces; ``value`` itself if it does not draw."""
    kind: Any = type(value)
    if issubclass(kind, _GENERATORS):
        return GeneratorStandIn(value)
    if issubclass(kind, MethodType | BuiltinMethodType) and issubclass(type(value.__self__), _GENERATORS):
        return _FUNCTIONS.get(id(value)) or (
            value if value.__name__ in _OTHER else _drawing(value, value.__name__)
        )
    parts = _parts(value)
    replaced: list[Any] = [*map(_stand_in, parts)]
    if all(a is b for a, b in zip(replaced, parts, strict=True)):
        return _FUNCTIONS.get(id(value), value)
    if kind is partial:
        return partial(replaced[0], *replaced[1:], **value.keywords)
    return tuple(replaced) if kind is tuple else staticmethod(replaced[0])


def _parts(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind is partial:
        return (value.func, *value.args)
    if kind is staticmethod:
        return (value.__func__,)
    return value if kind is tuple else ()
