"""Snapshot of the Python state behind a function: attributes, closures, globals and containers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from inspect import isbuiltin
from types import CodeType, FunctionType, MethodType, ModuleType

import numpy as np
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# State inside of libraries is theirs: caches of torch change from call to call and change no result.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "edgefl"}
_MOST_ITEMS = 1000


def snapshot(function: object) -> dict[str, object]:
    """Return the state that ``function`` can reach, a comparable value by path; tensors by identity and version."""
    found: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", function)]
    seen: set[int] = set()
    while waiting:
        path, thing = waiting.pop()
        if isinstance(thing, Tensor):
            found[path] = (id(thing), thing._version)
        elif isinstance(thing, _PLAIN):
            found[path] = repr(thing)  # NaN is equal to itself then
        elif isinstance(thing, np.ndarray):
            found[path] = (id(thing), thing.tobytes())
        elif id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, Mapping | Sequence | Set):
                found[path] = len(thing)
            waiting += [(f"{path}{name}", part) for name, part in _parts(thing)]
    return found


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, ModuleType | type) or isbuiltin(thing):
        return
    if isinstance(thing, partial):
        yield from (("", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, MethodType):
        yield from (("self", thing.__self__), ("", thing.__func__))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in [*thing.items()][:_MOST_ITEMS])
    elif isinstance(thing, Sequence | Set):
        yield from ((f"[{place}]", value) for place, value in enumerate([*thing][:_MOST_ITEMS]))
    elif isinstance(thing, nn.Module):
        own = {**thing._parameters, **thing._buffers, **thing._modules}
        yield from ((f".{name}", value) for name, value in {**vars(thing), **own}.items())
        yield "", type(thing).forward
    elif hasattr(thing, "__dict__") and not _is_library(type(thing).__module__):
        yield from ((f".{name}", value) for name, value in vars(thing).items())
        yield "", vars(type(thing)).get("__call__")


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    if _is_library(function.__module__):
        return
    yield from ((f".{name}", value) for name, value in vars(function).items())
    yield from (("defaults", function.__defaults__), ("defaults", function.__kwdefaults__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    scope = function.__globals__
    yield from ((name, scope[name]) for name in _names(function.__code__) if name in scope)


def _names(code: CodeType) -> set[str]:
    """Return all names in ``code`` and in the functions defined in it; some of them are globals."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
